"""Simulates a schedule's table many times: its dependencies are computed once, as plain indices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.pipeline import Kind, unchecked_table
from meshwright.pipeline.check import in_dependency_order, needs, results

_KINDS = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.INPUT: 2, Kind.WEIGHT: 3}
_LONG = 3
"""A table of more micro-batches than this per rank is simulated with fewer: once the pipeline is full, time grows by
equal parts, and so does the work of every rank."""

Step = tuple[int, int, int, tuple[tuple[int, int], ...]]
"""Rank, kind, stage, and what it waits for as (index of the step that produces it, its rank)."""


@dataclass(frozen=True)
class Played:
    """The result of a table under given times."""

    makespan_s: float
    busy_s: float
    """Work of the busiest rank."""
    rank: int
    """The busiest rank."""


def shortened(ranks: int, micro_batches: int) -> int:
    """How many micro-batches to simulate: the same number, or fewer with the same remainder over a round."""
    if micro_batches <= (_LONG + 1) * ranks:
        return micro_batches
    return _LONG * ranks + micro_batches % ranks


def play(
    schedule: str,
    ranks: int,
    micro_batches: int,
    virtual_stages: int | None,
    seconds: Sequence[Sequence[float]],
    send_s: float,
) -> Played:
    """Makespan and busiest rank; `seconds` are per stage: forward, whole backward, and its two halves."""
    played = shortened(ranks, micro_batches)
    makespan, busy = _once(ranks, _steps(schedule, ranks, played, virtual_stages), seconds, send_s)
    if played < micro_batches:
        shorter, less = _once(ranks, _steps(schedule, ranks, played - ranks, virtual_stages), seconds, send_s)
        rounds = (micro_batches - played) // ranks
        # A round takes at least the busiest rank's work of it, where the pipeline was not quite full yet.
        makespan += max(makespan - shorter, *(more - fewer for more, fewer in zip(busy, less, strict=True))) * rounds
        busy = [more + (more - fewer) * rounds for more, fewer in zip(busy, less, strict=True)]
    rank = max(range(ranks), key=busy.__getitem__)
    return Played(makespan, busy[rank], rank)


def _once(
    ranks: int, steps: list[Step], seconds: Sequence[Sequence[float]], send_s: float
) -> tuple[float, list[float]]:
    free, busy = [0.0] * ranks, [0.0] * ranks
    ends: list[float] = []
    for rank, kind, stage, waits in steps:
        start = free[rank]
        for place, maker in waits:
            at = ends[place] if maker == rank else ends[place] + send_s
            if at > start:
                start = at
        took = seconds[stage][kind]
        free[rank] = start + took
        busy[rank] += took
        ends.append(start + took)
    return max(free), busy


@lru_cache(maxsize=512)
def _steps(schedule: str, ranks: int, micro_batches: int, virtual_stages: int | None) -> list[Step]:
    """A table's actions in an order that respects their dependencies, overlapped pairs one after the other."""
    table = unchecked_table(schedule, ranks, micro_batches, virtual_stages)
    made: dict[tuple[str, int, int], tuple[int, int]] = {}
    steps: list[Step] = []
    for rank, actions in in_dependency_order(table):
        for action in actions:
            waits = tuple(made[need] for need in needs(table, action))
            for result in results(action):
                made[result] = len(steps), rank
            steps.append((rank, _KINDS[action.kind], action.stage, waits))
    return steps
