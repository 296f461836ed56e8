"""Which ranks hang: judged by their beats and this process's own clock, never by theirs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.launch.heartbeat import Beat

COLD, COLDEST_S = 10.0, 60.0
"""Before its first step a rank's phases may take this many times longer, and at least this long."""
VERDICT, SILENT = 0.7, 0.3
"""Fractions of run.watchdog_s: when to declare a hang, so that the report is in time, and what counts as silence."""


@dataclass(frozen=True)
class Stall:
    """A hang: who is to blame, and where every rank was last seen."""

    missing: tuple[int, ...]
    silent: bool
    """Whether the missing ranks gave no sign of life at all; otherwise only their main threads hang."""
    still_s: float
    last: Mapping[int, Beat]
    never_seen: tuple[int, ...] = ()

    def sentence(self, watchdog_s: float) -> str:
        """Who, for how long, and where they were; where the others wait."""
        who = _ranks(self.missing)
        how = "gave no sign of life" if self.silent else "made no progress"
        report = [f"{who} {how} for {self.still_s:.1f} s (run.watchdog_s = {watchdog_s:g})"]
        seen = [rank for rank in self.missing if rank in self.last]
        if seen:
            report.append("last seen in " + "; ".join(_each(self.last, seen)))
        if self.never_seen:
            report.append(f"{_ranks(self.never_seen)} never seen")
        waiting = [rank for rank, beat in self.last.items() if rank not in self.missing and not beat.done]
        if waiting:
            report.append("others in " + "; ".join(_each(self.last, waiting)))
        return ", ".join(report)


class StallDetector:
    """Tracks since when each rank has made no progress."""

    def __init__(self, ranks: int, watchdog_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._watchdog_s, self._clock = watchdog_s, clock
        self._looked = now = clock()
        self._last: dict[int, Beat] = {}
        self._beat_since = dict.fromkeys(range(ranks), now)
        self._moved_since = dict.fromkeys(range(ranks), now)

    def see(self, beats: Mapping[int, Beat]) -> None:
        """Take in the ranks' last beats.

        Time in which this process itself could not check is not counted: a machine may be that busy.
        """
        now = self._clock()
        missed = max(0.0, now - self._looked - SILENT * self._watchdog_s / 2)
        self._looked = now
        for since in (self._beat_since, self._moved_since):
            for rank in since:
                since[rank] = min(now, since[rank] + missed)
        for rank, beat in beats.items():
            before = self._last.get(rank)
            if before is None or beat.number != before.number:
                self._beat_since[rank] = now
            if before is None or beat.moves != before.moves:
                self._moved_since[rank] = now
            self._last[rank] = beat

    def verdict(self) -> Stall | None:
        """The hang, once it has lasted too long."""
        now = self._clock()
        still = {rank: now - since for rank, since in self._moved_since.items() if not self._done(rank)}
        quiet = {rank: now - self._beat_since[rank] for rank in still}
        limit = VERDICT * self._watchdog_s
        late = [rank for rank in still if max(still[rank], quiet[rank]) > limit * self._patience(rank)]
        return self.accuse(max(still[rank] for rank in late)) if late else None

    def accuse(self, still_s: float) -> Stall:
        """Name the ranks to blame for a hang: the silent ones, else those outside of collectives, else those behind."""
        now = self._clock()
        alive = [rank for rank in self._moved_since if not self._done(rank)]
        unseen = tuple(rank for rank in alive if rank not in self._last)
        silent = [rank for rank in alive if now - self._beat_since[rank] > SILENT * self._watchdog_s]
        if silent:
            return Stall(tuple(silent), True, still_s, dict(self._last), unseen)
        own = [rank for rank in alive if self._last[rank].collective is None]
        still = [rank for rank in own if now - self._moved_since[rank] > SILENT * self._watchdog_s]
        return Stall(tuple(still or _behind(self._last, alive)), False, still_s, dict(self._last))

    def _done(self, rank: int) -> bool:
        return rank in self._last and self._last[rank].done

    def _patience(self, rank: int) -> float:
        if rank in self._last and self._last[rank].warm:
            return 1.0
        return max(COLD, COLDEST_S / self._watchdog_s)


def _behind(beats: Mapping[int, Beat], ranks: Sequence[int]) -> list[int]:
    """The ranks at the earliest step; all of them if none is behind."""
    first = min(beats[rank].step for rank in ranks)
    return [rank for rank in ranks if beats[rank].step == first]


def _each(beats: Mapping[int, Beat], ranks: Sequence[int]) -> list[str]:
    """Where ranks are, grouped by place."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(str(beats[rank]), []).append(rank)
    several = len(places) > 1
    return [f"{place} ({_ranks(ranks)})" if several else place for place, ranks in places.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
