"""An interval for a prediction from the errors of runs like it: weighted quantiles, wider where there are few.

Errors are logarithms of measured over predicted. Every run counts by how like it is, and a source of n like runs counts
as one of √n, so that no table dominates. The centre is their median, drawn towards no error at all; the width holds 80%
of them, widened as Student's t does for as few sources as there are like it. One factor, found by leaving out one
source after the other, makes 80% of the rows of sources left out fall inside (conformal prediction over groups).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.traits import Distances, Traits

LEVEL = 0.8
"""Share of runs that intervals are meant to hold."""
_DRAWN = 2.0
"""Sources of no error that the centre is drawn towards: a bias that two sources share is half believed."""
_FEWEST = 1.0
"""Sources' worth of evidence below which an interval grows no more."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Where the logarithm of measured over predicted is expected."""

    low: float
    high: float
    sources: float
    """How many sources' worth of evidence there is: one that has a run just like it counts as one."""

    def of(self, value: float) -> tuple[float, float]:
        """The interval of a predicted value."""
        return value * float(np.exp(self.low)), value * float(np.exp(self.high))


@dataclass(frozen=True)
class _Shape:
    """An interval before the factor."""

    centre: float
    half: float
    sources: float


class Evidence:
    """Runs with the errors of their predictions, of time or of memory."""

    def __init__(
        self, runs: Sequence[Traits], errors: Sequence[float], sources: Sequence[str], kind: Literal["time", "memory"]
    ) -> None:
        self.runs, self.errors = tuple(runs), np.array(errors, dtype=np.float64)
        self.sources = tuple(sources)
        self._names = sorted(set(sources))
        self._source = np.array([self._names.index(name) for name in sources])
        self._kept_scores: Floats | None = None
        self._distances = Distances(runs, "calibrated" if kind == "time" else "own")

    def distances(self, run: Traits) -> Floats:
        """How far each run of the evidence is from this one."""
        return self._distances.to(run)

    def spread(self, run: Traits, factor: float, without: str | None = None) -> Spread:
        """The interval of a run's prediction, which includes the prediction itself; `without` leaves out a source."""
        shape = self._shape(run, without)
        half = factor * shape.half
        return Spread(min(0.0, shape.centre - half), max(0.0, shape.centre + half), shape.sources)

    def factor(self, count: Sequence[bool], without: str | None = None) -> float:
        """What half-widths are multiplied by, so that 80% of the counted rows fall inside intervals of other sources.

        `count` says for every row whether it is counted; those of the source `without` are not.
        """
        counted = np.array(count) & np.array([name != without for name in self.sources])
        sizes = np.bincount(self._source[counted], minlength=len(self._names))
        weights = 1.0 / np.sqrt(sizes[self._source[counted]])
        return weighted_quantile(self._scores()[counted], weights, LEVEL)

    def _scores(self) -> Floats:
        """Every row's error in half-widths of the interval that the other sources give it."""
        if self._kept_scores is None:
            shapes = [self._shape(run, source) for run, source in zip(self.runs, self.sources, strict=True)]
            centres = np.array([shape.centre for shape in shapes])
            self._kept_scores = np.abs(self.errors - centres) / np.array([shape.half for shape in shapes])
        return self._kept_scores

    def _shape(self, run: Traits, without: str | None) -> _Shape:
        likeness = np.exp(-self._distances.to(run))
        if without in self._names:
            likeness = np.where(self._source == self._names.index(without), 0.0, likeness)
        total = np.bincount(self._source, weights=likeness)
        weights = likeness / np.sqrt(np.maximum(total, 1e-300))[self._source]
        nearest = np.zeros(len(self._names))
        np.maximum.at(nearest, self._source, likeness)
        worth = float(nearest.sum())
        centre = weighted_quantile(self.errors, weights, 0.5) * worth / (worth + _DRAWN)
        half = weighted_quantile(np.abs(self.errors - centre), weights, LEVEL)
        return _Shape(centre, half * widened(worth), worth)


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """The value below which this share of the weight is, between neighbours by a straight line."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order]) - 0.5 * weights[order]
    return float(np.interp(share * weights.sum(), below, values[order]))


def widened(sources: float) -> float:
    """How much wider than its quantiles an interval from so few sources is: Student's t over the normal quantile, by
    Cornish and Fisher's expansion, and the uncertainty of the centre."""
    few = max(sources, _FEWEST)
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    student = z + sum(term / few**power for power, term in enumerate(terms, start=1))
    return student / z * sqrt(1 + 1 / few)
