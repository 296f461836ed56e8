"""What turns a single-device model into this rank's piece."""

from meshwright.parallel.apply import build
from meshwright.parallel.precision import DTYPES, Weights

__all__ = ["DTYPES", "Weights", "build"]
