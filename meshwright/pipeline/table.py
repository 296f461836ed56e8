"""A pipeline schedule as data: for every rank, the order in which it runs its actions."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """What is done to one micro-batch on one stage; INPUT then WEIGHT are the two halves of BACKWARD."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True)
class Action:
    """One action: its kind, micro-batch and stage."""

    kind: Kind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True)
class Table:
    """A whole schedule: which rank holds which stage, and the order of every rank's actions."""

    schedule: str
    ranks: int
    virtual_stages: int
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]
    """Per rank, in the order it runs them."""
    stage_ranks: tuple[int, ...]
    """The rank that holds each stage."""
    chains: tuple[range, ...]
    """Chains of stages that micro-batches pass through, each a whole copy of the model; one, or two for dualpipe."""
    overlapped: frozenset[tuple[Action, Action]] = frozenset()
    """Forward and backward of different micro-batches, neighbours in a rank's order, meant to run at the same time."""

    @cached_property
    def holdings(self) -> dict[int, list[tuple[int, ...]]]:
        """Per rank, how many micro-batches its stages hold when they hold most; kept here by what counts them."""
        return {}

    @cached_property
    def first_stages(self) -> frozenset[int]:
        """The stages micro-batches enter at."""
        return frozenset(chain[0] for chain in self.chains)

    @cached_property
    def last_stages(self) -> frozenset[int]:
        """The stages they end at, where the loss is."""
        return frozenset(chain[-1] for chain in self.chains)

    @property
    def stages(self) -> int:
        """How many stages there are over all ranks, copies included."""
        return len(self.stage_ranks)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward runs as two halves."""
        return any(action.kind is Kind.INPUT for order in self.orders for action in order)

    @property
    def parameter_copies(self) -> int:
        """Copies of the model the pipeline holds."""
        return len(self.chains)

    @property
    def stage_size(self) -> float:
        """A stage's part of what a rank holds of one copy of the model."""
        return self.parameter_copies / self.virtual_stages

    @property
    def transfers(self) -> int:
        """Activations and gradients sent from rank to rank in a step."""
        crossings = sum(
            self.stage_ranks[stage] != self.stage_ranks[stage + 1] for chain in self.chains for stage in chain[:-1]
        )
        return 2 * crossings * self.micro_batches // self.parameter_copies

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Versions of its weights each rank keeps: pipedream's backward needs those its forward saw."""
        if self.schedule == "pipedream":
            return self.in_flight
        return (1,) * self.ranks

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Most stage-micro-batches a rank holds whose forward has started and whose last backward part has not
        ended."""
        return tuple(_peak(order, (Kind.BACKWARD, Kind.WEIGHT)) for order in self.orders)

    @cached_property
    def in_flight_input(self) -> tuple[int, ...]:
        """The same count, freed as soon as the gradient of the stage's input is computed."""
        return tuple(_peak(order, (Kind.BACKWARD, Kind.INPUT)) for order in self.orders)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)

    def chain_of(self, stage: int) -> range:
        """The chain of stages this one belongs to."""
        return next(chain for chain in self.chains if stage in chain)

    def micro_batches_of(self, stage: int) -> range:
        """The micro-batches that pass through a stage: all, or its direction's share of them."""
        share = self.micro_batches // len(self.chains)
        first = self.chains.index(self.chain_of(stage)) * share
        return range(first, first + share)


def _peak(order: tuple[Action, ...], freeing: tuple[Kind, ...]) -> int:
    held = peak = 0
    for action in order:
        held += (action.kind is Kind.FORWARD) - (action.kind in freeing)
        peak = max(peak, held)
    return peak
