"""Simulates a table in time: when each action runs, how long the step takes, and how much of it is bubble."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.pipeline.check import Result, in_dependency_order, needs, results
from meshwright.pipeline.table import Action, Kind, Table

Seconds = float | Sequence[float]


@dataclass(frozen=True)
class StageTimes:
    """How long a stage takes over one micro-batch: one value for all stages, or one per stage."""

    forward_s: Seconds
    backward_s: Seconds
    """The whole backward, where it is not split."""
    input_s: Seconds
    weight_s: Seconds
    send_s: float = 0.0
    """One activation or gradient from rank to rank; the sender does not wait, and nothing is sent within a rank."""
    overlap: float | None = None
    """Time of an overlapped pair over the sum of its parts; by default the two run one after the other."""

    def of(self, action: Action) -> float:
        """Seconds that one action takes."""
        seconds = {
            Kind.FORWARD: self.forward_s,
            Kind.BACKWARD: self.backward_s,
            Kind.INPUT: self.input_s,
            Kind.WEIGHT: self.weight_s,
        }[action.kind]
        return float(seconds) if isinstance(seconds, (int, float)) else seconds[action.stage]


def share_times(
    table: Table,
    *,
    forward_s: float = 1.0,
    backward_s: float | None = None,
    input_s: float = 1.0,
    weight_s: float = 1.0,
    send_s: float = 0.0,
    overlap: float | None = None,
) -> StageTimes:
    """Times of a stage from those of a rank's share (1/ranks) of the model, so that schedules can be compared.

    By default the whole backward takes as long as its halves.
    """
    size = table.stage_size
    whole_s = input_s + weight_s if backward_s is None else backward_s
    return StageTimes(size * forward_s, size * whole_s, size * input_s, size * weight_s, send_s, overlap)


@dataclass(frozen=True)
class Span:
    """One action in time."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """The result of a table under given times."""

    makespan_s: float
    busy_s: tuple[float, ...]
    """Work of each rank."""
    spans: tuple[Span, ...]
    in_flight: tuple[int, ...]
    """Per rank, most stage-micro-batches whose forward has started and whose last backward part has not ended."""
    in_flight_input: tuple[int, ...]
    """The same, freed when the gradient of the stage's input is computed."""

    def spans_of(self, rank: int) -> list[Span]:
        """A rank's actions in time."""
        return [span for span in self.spans if span.rank == rank]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Idle time of each rank, filling and draining included."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def ideal_s(self) -> float:
        """The step time if its busiest rank never waited."""
        return max(self.busy_s)

    @property
    def bubble_s(self) -> float:
        """Idle time of the busiest rank."""
        return self.makespan_s - self.ideal_s

    @property
    def bubble_over_ideal(self) -> float:
        """Bubble over ideal time: (p − 1)/m for GPipe and 1F1B."""
        return self.bubble_s / self.ideal_s

    @property
    def bubble_share_of_step(self) -> float:
        """Bubble over the whole step: (p − 1)/(m + p − 1) for GPipe and 1F1B."""
        return self.bubble_s / self.makespan_s


def simulate(table: Table, times: StageTimes) -> Simulation:
    """Run every rank in its own order, each action as soon as its rank is free and its inputs have arrived."""
    ready: dict[Result, tuple[float, int]] = {}
    free = [0.0] * table.ranks
    busy = [0.0] * table.ranks
    spans = []

    def arrival(need: Result, rank: int) -> float:
        at, maker = ready[need]
        return at if maker == rank else at + times.send_s

    pair_factor = 1.0 if times.overlap is None else times.overlap
    for rank, step in in_dependency_order(table):
        for part in [(action,) for action in step] if times.overlap is None else [step]:
            arrivals = [arrival(need, rank) for action in part for need in needs(table, action)]
            start = max([free[rank], *arrivals])
            seconds = sum(times.of(action) for action in part) * (pair_factor if len(part) > 1 else 1.0)
            free[rank] = start + seconds
            busy[rank] += seconds
            for action in part:
                spans.append(Span(rank, action, start, free[rank]))
                ready.update(dict.fromkeys(results(action), (free[rank], rank)))
    return Simulation(max(free), tuple(busy), tuple(spans), table.in_flight, table.in_flight_input)
