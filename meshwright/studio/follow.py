"""Following a run's metrics: only new lines are read, and only what can be drawn is kept."""

import os
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

import numpy as np

from meshwright.reading import METRICS, Row, Tally, is_number, rows_in
from meshwright.studio.confined import Outside, open_inside

FIELDS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_bytes", "data_wait_s", "step_s")
"""The curves of a run, apart from its validation loss."""
AXES = ("step", "tokens", "time")
"""The possible x axes; time is the sum of step times."""
_CHUNK = 1 << 20
_MOST_ROWS = 1 << 16
"""Rows held while reading; beyond this they are folded into pairs of lowest and highest."""
_BUCKETS = 1500
_TAIL = 1500
"""Newest rows that are not folded, so that a restart can discard them."""
_MOST_VALIDATIONS = 5000
_MOST_REREADS = 8
"""A restart that goes back into folded rows causes a full reread; beyond this limit buckets may keep void steps."""


class Follower:
    """One run's metrics.jsonl: rows become (position on the axes, lowest, highest), folded when there are many."""

    def __init__(self, runs: Path, name: str) -> None:
        self._place = (runs, name, "metrics.jsonl")
        self._lock = Lock()
        self._starts: dict[int, float] = {}
        """First step of every attempt; rows of earlier attempts from there on are void."""
        self._rereads = 0
        self.size = 0
        self._ended = False
        self._clear()

    def _clear(self) -> None:
        self.tally = Tally(METRICS.name)
        """What could not be read."""
        self._in_long_line = False
        self.offset = 0
        self._raw_from = 0
        self._attempt = 0
        self._at = np.empty((0, len(AXES)))
        self._low = np.empty((0, len(FIELDS)), dtype=np.float32)
        self._mean = self._high = self._low
        self._count = np.empty(0, dtype=np.float32)
        """Steps that each row stands for, which weigh its mean."""
        self._validation: list[tuple[float, float]] = []

    @property
    def read_share(self) -> float:
        """How much of the file has been read; an incomplete last line does not count."""
        return 1.0 if self._ended else min(0.999, self.offset / max(1, self.size))

    @property
    def version(self) -> int:
        """The file's size once all of it has been read; less before."""
        return self.size if self._ended else self.offset

    def read(self, until: float) -> None:
        """Read new lines until the file ends or the monotonic clock reaches `until`."""
        with self._lock:
            try:
                descriptor = open_inside(*self._place)
            except Outside:  # no metrics yet
                self.size, self._ended = 0, True
                return
            try:
                self.size = os.fstat(descriptor).st_size
                if self.size < self.offset:  # the file was replaced
                    self._starts.clear()
                    self._rereads = 0
                    self._clear()
                self._ended = True
                while self.offset < self.size:
                    chunk = os.pread(descriptor, _CHUNK, self.offset)
                    whole = chunk.rfind(b"\n") + 1
                    if not whole and len(chunk) < _CHUNK:
                        break
                    before = self.offset
                    self._take(self._rows(chunk[:whole]))
                    self.offset = self.offset + (whole or _CHUNK) if self.offset == before else 0
                    if monotonic() > until:
                        self._ended = self.offset == self.size
                        break
            finally:
                os.close(descriptor)
            self._fold(_BUCKETS, _TAIL)

    def _rows(self, lines: bytes) -> list[Row]:
        """Rows of complete lines; none for part of a line that is longer than any valid row."""
        if not lines:
            if not self._in_long_line:
                self.tally.lines += 1
                self.tally.count_bad(f"it has more than {_CHUNK:,} bytes", self.tally.lines)
            self._in_long_line = True
            return []
        if self._in_long_line:
            lines = lines[lines.index(b"\n") + 1 :]
            self._in_long_line = False
        return rows_in(lines, METRICS, self.tally)

    def _take(self, rows: list[dict[str, Any]]) -> None:
        """Add rows, attempt by attempt; may start over if a restart goes back into folded rows."""
        attempts = [row.get("attempt", 0) for row in rows]
        if attempts.count(self._attempt) == len(rows):
            self._append(rows)
            return
        start = 0
        for place, attempt in enumerate(attempts):
            if attempt > self._attempt:
                self._append(self._current(rows[start:place]))
                start = place
                if not self._begin(attempt, rows[place]["step"]):
                    self._clear()
                    self.offset = -1  # changed: the caller starts over
                    return
        self._append(self._current(rows[start:]))

    def _current(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of this attempt: an older attempt that has not noticed its end may still write."""
        return [row for row in rows if row.get("attempt", 0) == self._attempt]

    def _begin(self, attempt: int, step: float) -> bool:
        """Discard rows of earlier attempts from this step on; False if they can no longer be separated."""
        self._attempt = attempt
        known = attempt in self._starts
        self._starts[attempt] = step
        keep = int(np.searchsorted(self._at[:, 0], step))
        if keep < self._raw_from and not known and self._rereads < _MOST_REREADS:
            self._rereads += 1
            return False
        self._cut(keep)
        self._validation = [point for point in self._validation if point[0] < step]
        return True

    def _cut(self, keep: int) -> None:
        self._at, self._low, self._high = self._at[:keep], self._low[:keep], self._high[:keep]
        self._mean, self._count = self._mean[:keep], self._count[:keep]
        self._raw_from = min(self._raw_from, keep)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        void = float("inf")
        if self._starts and self._attempt < max(self._starts):
            void = min(first for attempt, first in self._starts.items() if attempt > self._attempt)
        for row in (row for row in rows if "val_loss" in row):
            known = is_number(row["val_loss"]) and row["step"] < void
            if known and len(self._validation) < _MOST_VALIDATIONS:
                self._validation.append((row["step"], row["val_loss"]))
        rows = [row for row in rows if "loss" in row]
        if not rows:
            return
        table = _columns(rows, ("step", "tokens", *FIELDS))
        table = table[table[:, 0] < void]
        table[~np.isfinite(table)] = np.nan
        places, values = table[:, :2], table[:, 2:]
        seconds = np.nan_to_num(values[:, FIELDS.index("step_s")])
        elapsed = np.cumsum(seconds) + (self._at[-1, 2] if len(self._at) else 0.0)
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
        values[~np.isfinite(values)] = np.nan
        self._at = np.concatenate([self._at, np.column_stack([places, elapsed])])
        self._low = np.concatenate([self._low, values])
        self._high = np.concatenate([self._high, values])
        self._mean = np.concatenate([self._mean, values])
        self._count = np.concatenate([self._count, np.ones(len(values), dtype=np.float32)])
        if len(self._at) - self._raw_from > _MOST_ROWS:
            self._fold(_BUCKETS, _TAIL)

    def _fold(self, buckets: int, tail: int) -> None:
        """Keep the newest rows and fold all before them, if that reduces their number."""
        older = len(self._at) - tail
        if older <= 2 * buckets:
            return
        at, low, high = folded(self._at[:older], self._low[:older], self._high[:older], buckets)
        mean, count = folded_mean(self._mean[:older], self._count[:older], buckets)
        self._raw_from = len(at)
        self._at = np.concatenate([at, self._at[older:]])
        self._low = np.concatenate([low, self._low[older:]])
        self._high = np.concatenate([high, self._high[older:]])
        self._mean = np.concatenate([mean, self._mean[older:]])
        self._count = np.concatenate([count, self._count[older:]])

    def drawn(self, axis: str, buckets: int) -> dict[str, Any]:
        """The curves over an axis, lowest, highest and mean of every bucket, as plain lists; gaps are None."""
        with self._lock:
            at, low, high, mean, count = self._at, self._low, self._high, self._mean, self._count
            validation = list(self._validation)
        if len(at) > 2 * buckets:
            at, low, high = folded(at, low, high, buckets)
            mean, _ = folded_mean(mean, count, buckets)
        place = AXES.index(axis)
        fields: dict[str, Any] = {}
        for number, name in enumerate(FIELDS):
            least, most = low[:, number], high[:, number]
            if np.isfinite(most).any():
                same = np.array_equal(least, most, equal_nan=True)
                more = {} if same else {"high": _plain(most), "mean": _plain(mean[:, number])}
                fields[name] = {"low": _plain(least), **more}
        steps = [step for step, _ in validation]
        return {
            "x": _plain(at[:, place]),
            "fields": fields,
            "val_loss": {"x": _plain(self.places(steps, axis)), "y": [value for _, value in validation]},
        }

    def places(self, steps: Sequence[float], axis: str) -> Any:
        """The positions of steps on an axis."""
        if not len(self._at) or not len(steps):
            return np.array(steps, dtype=float)
        return np.interp(steps, self._at[:, 0], self._at[:, AXES.index(axis)])


def folded(at: Any, low: Any, high: Any, buckets: int) -> tuple[Any, Any, Any]:
    """Rows in `buckets` buckets of equal size: the last position, the lowest and the highest value of each."""
    edges = _edges(len(at), buckets)
    ends = np.append(edges[1:], len(at)) - 1
    return at[ends], np.fmin.reduceat(low, edges), np.fmax.reduceat(high, edges)


def folded_mean(mean: Any, count: Any, buckets: int) -> tuple[Any, Any]:
    """The mean of each of the same buckets, every row weighed by the steps it stands for, and their number."""
    edges = _edges(len(mean), buckets)
    weight = np.where(np.isfinite(mean), count[:, None], 0.0)
    with np.errstate(invalid="ignore"):  # a bucket without a finite value has no mean
        means = np.add.reduceat(np.nan_to_num(mean) * weight, edges) / np.add.reduceat(weight, edges)
    return means.astype(np.float32), np.add.reduceat(count, edges)


def _edges(rows: int, buckets: int) -> Any:
    return np.unique(np.linspace(0, rows, buckets, endpoint=False).astype(int))


def _columns(rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
    table: list[Sequence[Any]]
    try:
        table = list(map(itemgetter(*names), rows))
    except KeyError:
        table = [[row.get(name) for name in names] for row in rows]
    return np.array(table, dtype=float)  # None becomes nan


def _plain(values: Any) -> list[float | None]:
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]
