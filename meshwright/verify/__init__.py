"""Layout parity: a small job in its layout on CPU processes, compared with the same training in one process."""

from meshwright.calls import callable_as
from meshwright.verify.check import FORMATS, Check, Verdict, check, check_job
from meshwright.verify.collectives import Calls, Contract, Outcome, merged
from meshwright.verify.compare import Comparison, compare, worst
from meshwright.verify.features import features_of
from meshwright.verify.generate import Draw, draw
from meshwright.verify.gpu_replay import replay_on_gpu
from meshwright.verify.layer import LayerGrade, grade_layer
from meshwright.verify.matrix import Line, LineResult, load_matrix, own_model_lines, run_matrix
from meshwright.verify.observe import Observation, Shard, observe
from meshwright.verify.ranks import RankError, RankGroup, run_ranks
from meshwright.verify.real_size import require_real_size
from meshwright.verify.sample import OUTCOMES, Answer, run_draws, subject_of
from meshwright.verify.shrink import Change, resolved_for_check, shrink

__all__ = [
    "FORMATS",
    "OUTCOMES",
    "Answer",
    "Calls",
    "Change",
    "Check",
    "Comparison",
    "Contract",
    "Draw",
    "LayerGrade",
    "Line",
    "LineResult",
    "Observation",
    "Outcome",
    "RankError",
    "RankGroup",
    "Shard",
    "Verdict",
    "check",
    "check_job",
    "compare",
    "draw",
    "features_of",
    "grade_layer",
    "load_matrix",
    "merged",
    "observe",
    "own_model_lines",
    "replay_on_gpu",
    "require_real_size",
    "resolved_for_check",
    "run_draws",
    "run_matrix",
    "run_ranks",
    "shrink",
    "subject_of",
    "worst",
]

callable_as(__name__, "meshwright.api.verifying", "verify")
