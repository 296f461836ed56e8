"""Training: the loops, the optimizer, evaluation and generation."""

from meshwright.train.asynchronous import AsynchronousTraining, make_training, windows
from meshwright.train.device import (
    choose_device,
    device_name,
    device_peak_flops,
    emulated_format,
    memory_errors_explained,
    prepare_device,
)
from meshwright.train.evaluate import Score, evaluate, score
from meshwright.train.feed import fingerprint, held_out_batches, open_corpus, require_enough_text, training_loader
from meshwright.train.generate import generate
from meshwright.train.kernels import choose_attention
from meshwright.train.loop import Training
from meshwright.train.optimizer import build_optimizer, clip_gradients, cuts_blocks, states_of
from meshwright.train.progress import ConsoleProgress
from meshwright.train.recorder import Progress, Recorder, Silent
from meshwright.train.run import FLOPS_CONVENTION, Outcome
from meshwright.train.scaling import LossScale
from meshwright.train.schedule import learning_rate
from meshwright.train.state import saved_cursors

__all__ = [
    "FLOPS_CONVENTION",
    "AsynchronousTraining",
    "ConsoleProgress",
    "LossScale",
    "Outcome",
    "Progress",
    "Recorder",
    "Score",
    "Silent",
    "Training",
    "build_optimizer",
    "choose_attention",
    "choose_device",
    "clip_gradients",
    "cuts_blocks",
    "device_name",
    "device_peak_flops",
    "emulated_format",
    "evaluate",
    "fingerprint",
    "generate",
    "held_out_batches",
    "learning_rate",
    "make_training",
    "memory_errors_explained",
    "open_corpus",
    "prepare_device",
    "require_enough_text",
    "saved_cursors",
    "score",
    "states_of",
    "training_loader",
    "windows",
]
