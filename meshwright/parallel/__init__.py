"""What turns a single-device model into this rank's piece."""

from meshwright.parallel.apply import build
from meshwright.parallel.engine import Engine
from meshwright.parallel.layout import axes, is_asynchronous, ranks_of, require_layout, table_of
from meshwright.parallel.pieces import Piece
from meshwright.parallel.pipedream import PipeDream
from meshwright.parallel.precision import DTYPES, Weights, WholeWeights
from meshwright.parallel.world import World, join_world

__all__ = [
    "DTYPES",
    "Engine",
    "Piece",
    "PipeDream",
    "Weights",
    "WholeWeights",
    "World",
    "axes",
    "build",
    "is_asynchronous",
    "join_world",
    "ranks_of",
    "require_layout",
    "table_of",
]
