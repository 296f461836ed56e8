"""Whose turn sample i is: sources take weighted turns that stay within one sample of their weights, without history.

A source with share w has had w·n samples after n of them where turns could be divided. Its j-th turn (from 0) must not
come before w·n exceeds j, and must be over when w·n reaches j + 1; serving the turn that must be over first meets both
for all sources at once, since the divided turns themselves show that it can be done. Shares that are whole numbers of a
period's turns make the result periodic, so that one period answers for every sample there is.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from math import gcd, inf, lcm

import numpy as np
from numpy.typing import NDArray

LONGEST_PERIOD = 1 << 16


def turns_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Turns of each source in one period: exact where a period of at most 2^16 allows it, else nearest to the weights.

    A source with a weight has at least one turn.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    turns = [max(1, int(share * LONGEST_PERIOD)) if share else 0 for share in shares]
    most_left = sorted(range(len(shares)), key=lambda i: turns[i] - shares[i] * LONGEST_PERIOD)
    missing = LONGEST_PERIOD - sum(turns)
    for source in most_left[: max(0, missing)]:
        turns[source] += 1
    turns[turns.index(max(turns))] += min(0, missing)
    return tuple(count // gcd(*turns) for count in turns)


@dataclass(frozen=True)
class _Segment:
    """Samples from `start` on, in turns that repeat as long as the segment lasts."""

    start: int
    sources: NDArray[np.int32]
    """Whose turn each sample is."""
    earlier: NDArray[np.int64]
    """How many turns its source had before, from the start of the segment on."""
    before: tuple[int, ...]
    """Turns each source had before the segment."""
    repeat: tuple[int, ...]
    """Turns each source has in one repetition."""


class Blend:
    """Sources by weights that may change at given samples; at every prefix each is within one sample of its share."""

    def __init__(self, stages: Sequence[tuple[int, tuple[float, ...]]]) -> None:
        """Stages are (first sample, weights), ascending from sample 0."""
        self.shares = tuple((start, turns_of(weights)) for start, weights in stages)
        self._segments = _segments(self.shares)
        self._starts = [segment.start for segment in self._segments]

    def place(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and how many samples that source gave before."""
        segment = self._segment(sample)
        repetition, slot = divmod(sample - segment.start, len(segment.sources))
        source = int(segment.sources[slot])
        return source, segment.before[source] + repetition * segment.repeat[source] + int(segment.earlier[slot])

    def given(self, samples: int) -> tuple[int, ...]:
        """How many of the first samples each source gave."""
        segment = self._segment(samples)
        repetition, slot = divmod(samples - segment.start, len(segment.sources))
        partial = np.bincount(segment.sources[:slot], minlength=len(segment.before))
        return tuple(
            int(before + repetition * repeat + part)
            for before, repeat, part in zip(segment.before, segment.repeat, partial, strict=True)
        )

    def _segment(self, sample: int) -> _Segment:
        return self._segments[bisect_right(self._starts, sample) - 1]


@lru_cache(maxsize=8)
def _segments(stages: tuple[tuple[int, tuple[int, ...]], ...]) -> list[_Segment]:
    """The whole order as a few tables: of each stage its first turns, one period, and its last turns.

    Until the next turn of every source must be over only after the stage ends, its turns are those of a stage without
    end: whole periods between equal states need no look at all.
    """
    queue = _Queue(stages)
    made: list[_Segment] = []
    for (start, turns), (end, _) in zip(stages, (*stages[1:], (None, ())), strict=True):
        period, sample = sum(turns), start
        ahead = max(period // count + 2 for count in turns if count)
        while end is None or sample < end:
            before = tuple(queue.had)
            sources = queue.serve(sample, period if end is None else min(period, end - sample))
            repeat = tuple(had - was for had, was in zip(queue.had, before, strict=True))
            made.append(_segment(sample, sources, before, repeat))
            if repeat == turns and end is None:
                return made
            repetitions = 1 if end is None or repeat != turns else max(1, (end - sample - ahead) // period)
            if repetitions > 1:
                queue.had = [was + repetitions * count for was, count in zip(before, turns, strict=True)]
            sample += repetitions * len(sources)
    return made


def _segment(start: int, sources: NDArray[np.int32], before: tuple[int, ...], repeat: tuple[int, ...]) -> _Segment:
    earlier = np.empty(len(sources), np.int64)
    for source, count in enumerate(repeat):
        if count:
            earlier[sources == source] = np.arange(count)
    return _Segment(start, sources, earlier, before, repeat)


class _Queue:
    """Serves turns in the order in which they must be over; what a source is due is a straight line in each stage."""

    def __init__(self, stages: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self.had = [0] * len(stages[0][1])
        """Turns of each source so far."""
        self._unit = lcm(*(sum(turns) for _, turns in stages))
        """Dues are whole multiples of 1 / unit."""
        self._starts = [start for start, _ in stages]
        self._spans = [end - start for start, end in pairwise((*self._starts, inf))]
        self._rates = [[count * self._unit // sum(turns) for count in turns] for _, turns in stages]
        self._dues = [[0] * len(self.had)]
        for span, rates in zip(self._spans[:-1], self._rates, strict=False):
            self._dues.append([due + rate * int(span) for due, rate in zip(self._dues[-1], rates, strict=True)])

    def serve(self, sample: int, count: int) -> NDArray[np.int32]:
        """Whose turn each of the next samples is; all of them belong to one stage."""
        stage = bisect_right(self._starts, sample) - 1
        waiting = [(*self._window(source, stage), source) for source in range(len(self.had))]
        heapify(waiting)
        ready: list[tuple[float, int]] = []
        served = []
        for now in range(sample, sample + count):
            while waiting and waiting[0][0] <= now:
                _, end, source = heappop(waiting)
                heappush(ready, (end, source))
            source = ready[0][1]
            served.append(source)
            self.had[source] += 1
            begin, end = self._window(source, stage)
            if begin <= now + 1:
                heapreplace(ready, (end, source))
            else:
                heappop(ready)
                heappush(waiting, (begin, end, source))
        return np.array(served, np.int32)

    def _window(self, source: int, stage: int) -> tuple[float, float]:
        """The first sample that may be a source's next turn, and the number of samples after which it must be over."""
        due = self.had[source] * self._unit
        rate, missing = self._rates[stage][source], due - self._dues[stage][source]
        if rate and missing >= 0:
            begin, end = missing // rate, -(-(missing + self._unit) // rate)
            if end <= self._spans[stage]:
                return self._starts[stage] + begin, self._starts[stage] + end
        return self._reaches(source, due + 1, stage) - 1, self._reaches(source, due + self._unit, stage)

    def _reaches(self, source: int, due: int, stage: int) -> float:
        """The number of samples at which a source's due reaches this much; no earlier than the stage begins."""
        for number in range(stage, len(self._starts)):
            rate, missing = self._rates[number][source], due - self._dues[number][source]
            if missing <= 0:
                return self._starts[number]
            if rate and -(-missing // rate) <= self._spans[number]:
                return self._starts[number] - (-missing // rate)
        return inf
