"""What a reference model gives pairs of answers: the sums of log-probabilities, found by where a pair begins."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.store import Int64Array

Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class References:
    """Sums of log-probabilities of both answers (N × 2) of the pairs that begin at the given places, ascending."""

    starts_N: Int64Array
    sums_N2: Float64Array

    def of(self, pairs: Sequence[Int64Array]) -> Float64Array:
        """Those of the pairs of some sequences (B × P × 2), P the most pairs of one; zeros where there is none."""
        found = np.zeros((len(pairs), max(1, max(map(len, pairs))), 2))
        for row, starts in enumerate(pairs):
            places = np.searchsorted(self.starts_N, starts)
            if not self.knows(starts):
                raise KeyError(f"no reference for the pairs at {starts.tolist()}")
            found[row, : len(starts)] = self.sums_N2[places]
        return found

    def knows(self, starts: Int64Array) -> bool:
        """Whether there are sums for all of these pairs."""
        places = np.searchsorted(self.starts_N, starts)
        inside = places < len(self.starts_N)
        return bool(inside.all()) and bool((self.starts_N[places] == starts).all())


class Blank(References):
    """Zeros for every pair: for a loss without a reference, and for measurements, whose time does not depend on it."""

    def __init__(self) -> None:
        super().__init__(np.empty(0, np.int64), np.empty((0, 2)))

    def of(self, pairs: Sequence[Int64Array]) -> Float64Array:
        """Zeros."""
        return np.zeros((len(pairs), max(1, max(map(len, pairs))), 2))

    def knows(self, starts: Int64Array) -> bool:
        """All of them."""
        return True
