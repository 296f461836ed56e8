"""What turns a single-device model into this rank's piece."""

from meshwright.parallel.apply import build
from meshwright.parallel.compress import CompressedWeights
from meshwright.parallel.engine import Engine, OneStage
from meshwright.parallel.held import held_gradients, held_parameters
from meshwright.parallel.host import Traffic, host_buffer, take_traffic
from meshwright.parallel.offload import OffloadedWeights, update
from meshwright.parallel.pieces import Piece
from meshwright.parallel.pipedream import PipeDream
from meshwright.parallel.precision import DTYPES, Weights, WholeWeights, one_pass_here
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
    "build",
    "held_gradients",
    "held_parameters",
    "host_buffer",
    "join_world",
    "one_pass_here",
    "take_traffic",
    "update",
]
