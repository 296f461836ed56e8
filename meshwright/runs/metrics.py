"""A run's metrics in bounded memory: all rows of a normal run, the extremes of a very long one."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from meshwright.reading import METRICS, Row, Tally, stream_rows

MOST_ROWS = 1 << 14
"""Rows kept; beyond that, the lowest and the highest loss of every few neighbours."""
_LONGEST_LIST = 16
_LONG = frozenset((str, list, dict))
"""Types of values that may need much memory."""


class Sums(NamedTuple):
    """Running sums over the rows."""

    rows: int = 0
    seconds: float = 0.0
    """Total time of the steps."""
    bad: int = 0
    """Steps without a finite loss."""
    first_bad: int | None = None


@dataclass
class Metrics:
    """The contents of metrics.jsonl; for steps recomputed after a restart, the later rows."""

    rows: list[Row] = field(default_factory=list)
    sums: Sums = field(default_factory=Sums)
    tally: Tally = field(default_factory=lambda: Tally(METRICS.name))

    def last(self) -> Row | None:
        """The newest row of a step."""
        return next((row for row in reversed(self.rows) if "loss" in row), None)


def read_metrics(path: Path, newest_bytes: int | None = None) -> Metrics:
    """Read a run's metrics, however long the file is, or only the newest."""
    metrics, thinned, attempt = Metrics(), _Thinned(), 0
    for row in stream_rows(path, METRICS, metrics.tally, newest_bytes):
        number = row.get("attempt", 0)
        if number > attempt:  # it starts from a checkpoint: earlier attempts' rows beyond it are void
            attempt = number
            thinned.cut(row["step"])
        if number == attempt:
            thinned.add(row)
    metrics.rows, metrics.sums = thinned.rows(), thinned.sums
    return metrics


_Held = tuple[Row, Sums]


class _Thinned:
    """Rows as they arrive, thinned to the same number of each kind (steps, evaluations) in every interval."""

    def __init__(self) -> None:
        self._kept: list[_Held] = []
        self._fresh: list[_Held] = []
        self.sums = Sums()
        self._group = 1
        """This many consecutive rows become at most two of each kind."""

    def add(self, row: Row) -> None:
        self.sums = _added(self.sums, row)
        self._fresh.append((_slim(row), self.sums))
        if len(self._fresh) >= self._group:
            self._kept += self._fresh if self._group == 1 else _extremes(self._fresh)
            self._fresh = []
        if len(self._kept) > MOST_ROWS:
            groups = range(0, len(self._kept), 4)
            self._kept = [one for start in groups for one in _extremes(self._kept[start : start + 4])]
            self._group = 2 * max(2, self._group)

    def cut(self, step: int) -> None:
        """Drop the rows from a step on."""
        for held in (self._fresh, self._kept):
            while held and held[-1][0]["step"] >= step:
                held.pop()
        left = self._fresh or self._kept
        self.sums = left[-1][1] if left else Sums()

    def rows(self) -> list[Row]:
        return [row for row, _ in (*self._kept, *self._fresh)]


def _extremes(some: list[_Held]) -> list[_Held]:
    """Of each kind of row the one with the lowest loss and the one with the highest, in order."""
    chosen = set()
    for name in ("loss", "val_loss"):
        own = [(_height(one[0][name]), place) for place, one in enumerate(some) if one[0].get(name) is not None]
        chosen |= {min(own)[1], max(own)[1]} if own else set()
    return [some[place] for place in sorted(chosen or {0})]


def _height(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _added(sums: Sums, row: Row) -> Sums:
    seconds = row.get("step_s") or 0.0
    bad = row.get("loss") is not None and not math.isfinite(row["loss"])
    first = row["step"] if bad and sums.first_bad is None else sums.first_bad
    return Sums(sums.rows + 1, sums.seconds + (seconds if math.isfinite(seconds) else 0.0), sums.bad + bad, first)


def _slim(row: Row) -> Row:
    """A row without values that are never plotted and could be long."""
    if _LONG.isdisjoint(map(type, row.values())):
        return row
    return {name: value for name, value in row.items() if _is_small(value)}


def _is_small(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= _LONGEST_LIST and all(type(item) is not list and _is_small(item) for item in value)
    return not isinstance(value, dict) and not (isinstance(value, str) and len(value) > 200)
