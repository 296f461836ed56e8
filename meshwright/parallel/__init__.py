"""What turns a single-device model into this rank's piece."""

from meshwright.parallel.apply import build
from meshwright.parallel.layout import axes, ranks_of, require_layout
from meshwright.parallel.pieces import Piece
from meshwright.parallel.precision import DTYPES, Weights, WholeWeights
from meshwright.parallel.world import World, join_world

__all__ = [
    "DTYPES",
    "Piece",
    "Weights",
    "WholeWeights",
    "World",
    "axes",
    "build",
    "join_world",
    "ranks_of",
    "require_layout",
]
