"""Training: the loops, the optimizer, evaluation and generation."""

from meshwright.calls import callable_as
from meshwright.train.activity import Activity
from meshwright.train.around import Around
from meshwright.train.asynchronous import AsynchronousTrainer, windows
from meshwright.train.bad_steps import Rewind
from meshwright.train.device import (
    capabilities,
    capabilities_here,
    choose_device,
    device_name,
    device_peak_flops,
    emulated_format,
    prepare_device,
)
from meshwright.train.evaluate import Score, evaluate, score
from meshwright.train.feed import (
    evaluated_sequences,
    fingerprint,
    held_out_batches,
    open_corpus,
    require_enough_text,
    training_loader,
)
from meshwright.train.garbage import frozen
from meshwright.train.generate import generate, stream
from meshwright.train.kernels import choose_attention
from meshwright.train.meter import FLOPS_CONVENTION
from meshwright.train.optimizer import build_optimizer, clip_gradients, states_of
from meshwright.train.out_of_memory import OutOfMemory, memory_errors_explained
from meshwright.train.outcome import Outcome
from meshwright.train.preference import BLANK, Answers, PairScore, answers_of, find_references, score_pairs
from meshwright.train.progress import ConsoleProgress
from meshwright.train.recorder import Progress, Recorder, Silent
from meshwright.train.scaling import LossScale
from meshwright.train.schedule import learning_rate
from meshwright.train.setup import make_trainer, set_up_trainer
from meshwright.train.start import Start
from meshwright.train.trace import Trace, TraceSteps, require_nvtx, require_traceable
from meshwright.train.trainer import Trainer

__all__ = [
    "BLANK",
    "FLOPS_CONVENTION",
    "Activity",
    "Answers",
    "Around",
    "AsynchronousTrainer",
    "ConsoleProgress",
    "LossScale",
    "OutOfMemory",
    "Outcome",
    "PairScore",
    "Progress",
    "Recorder",
    "Rewind",
    "Score",
    "Silent",
    "Start",
    "Trace",
    "TraceSteps",
    "Trainer",
    "answers_of",
    "build_optimizer",
    "capabilities",
    "capabilities_here",
    "choose_attention",
    "choose_device",
    "clip_gradients",
    "device_name",
    "device_peak_flops",
    "emulated_format",
    "evaluate",
    "evaluated_sequences",
    "find_references",
    "fingerprint",
    "frozen",
    "generate",
    "held_out_batches",
    "learning_rate",
    "make_trainer",
    "memory_errors_explained",
    "open_corpus",
    "prepare_device",
    "require_enough_text",
    "require_nvtx",
    "require_traceable",
    "score",
    "score_pairs",
    "set_up_trainer",
    "states_of",
    "stream",
    "training_loader",
    "windows",
]

callable_as(__name__, "meshwright.api.training", "train")
