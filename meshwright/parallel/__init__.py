"""What turns a single-device model into this rank's piece."""

from meshwright.parallel.activations import holdings_of_rank, saved_by_name, stages_of_rank
from meshwright.parallel.apply import build
from meshwright.parallel.compress import CompressedWeights
from meshwright.parallel.engine import Engine, OneStage
from meshwright.parallel.held import held_gradients, held_parameters
from meshwright.parallel.host import Traffic, host_buffer, take_traffic
from meshwright.parallel.layout import axes, is_asynchronous, ranks_of, require_layout, table_of
from meshwright.parallel.offload import OffloadedWeights, update
from meshwright.parallel.one_pass import gradient_format, one_pass_here
from meshwright.parallel.pieces import Piece
from meshwright.parallel.pipedream import PipeDream
from meshwright.parallel.precision import DTYPES, Weights, WholeWeights
from meshwright.parallel.recompute import budget_span, recompute_modes
from meshwright.parallel.world import World, join_world

__all__ = [
    "DTYPES",
    "CompressedWeights",
    "Engine",
    "OffloadedWeights",
    "OneStage",
    "Piece",
    "PipeDream",
    "Traffic",
    "Weights",
    "WholeWeights",
    "World",
    "axes",
    "budget_span",
    "build",
    "gradient_format",
    "held_gradients",
    "held_parameters",
    "holdings_of_rank",
    "host_buffer",
    "is_asynchronous",
    "join_world",
    "one_pass_here",
    "ranks_of",
    "recompute_modes",
    "require_layout",
    "saved_by_name",
    "stages_of_rank",
    "table_of",
    "take_traffic",
    "update",
]
