"""What a rehearsal found: of every rank that was run, its memory, its compute and its messages; and the step they make.

Everything here is plain data that goes into `rehearsal.json` and comes back from it.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Messages:
    """All of a step's collectives or messages of one kind, over one group and of one size."""

    kind: str
    """As torch calls it: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", "broadcast"."""
    axis: str
    """The layout's axes that the group spans, such as "dp_shard" or "dp_shard·cp"; "world" for all ranks."""
    ranks: tuple[int, ...]
    """Of the group; of a send or receive this rank and the other one."""
    bytes: int
    """Of one: what a rank contributes to or receives from it, whichever is more."""
    count: int
    """In one step."""


@dataclass(frozen=True)
class RankMemoryUse:
    """A rank's memory, measured and planned. On a CPU the bytes of live tensors; reserved and device are None there."""

    allocated_bytes: int
    reserved_bytes: int | None
    device_bytes: int | None
    by_kind: dict[str, int]
    """What was there at the peak, by kind: weights, gradients, optimizer states, activations, other."""
    planned_bytes: float | None
    """What the plan says of `allocated_bytes`; None if the planner does not know the job."""
    planned_reserved_bytes: float | None
    planned_terms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RehearsedRank:
    """One rank of the job's world, run alone with the others' messages replaced."""

    rank: int
    pipeline_rank: int
    stages: tuple[int, ...]
    """The stages of the model it holds."""
    alike: int
    """How many ranks of the world hold and compute the same."""
    state: Literal["measured", "out of memory"]
    steps: int
    step_s: float
    """Median of the timed steps, in which messages took no time."""
    phases_s: dict[str, float]
    """Compute of a step by phase, each waited for: data, forward, loss, backward, optimizer, other."""
    actions_s: dict[str, float]
    """In a pipeline, the median seconds of one action of a schedule by kind and stage: "F0", "B0", "W0"."""
    kernels: dict[str, Any] | None
    """On request: a step's kernels by kind and the longest of them."""
    memory: RankMemoryUse | None
    needed_bytes: int | None
    """Out of memory: what the allocator had and what it was asked for."""
    messages: tuple[Messages, ...]
    checkpoint_bytes: int | None
    """What this rank writes for a checkpoint."""
    checkpoint_s: float | None
    place: str = ""
    """Where its stages are in the pipeline: "first stage", "stages 2, 6"; empty without a pipeline."""
    asked_bytes: int | None = None
    """Out of memory: the tensor that could not be allocated."""
    idle_bytes: int | None = None
    """Out of memory: what the allocator had free, in pieces that were too small for it."""

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "RehearsedRank":
        """Back from a dictionary, as `Rehearsal.to_json` makes it."""
        messages = tuple(Messages(**_tuples(one, "ranks")) for one in saved["messages"])
        memory = None if saved["memory"] is None else RankMemoryUse(**saved["memory"])
        return cls(**{**_tuples(saved, "stages"), "messages": messages, "memory": memory})


@dataclass(frozen=True)
class RehearsedStep:
    """The cluster's step: measured compute, and the wires' time from the cluster's links laid over it."""

    step_s: float
    measured_s: float
    """Compute along the slowest rank."""
    modelled_s: float
    """Messages that nothing hides, and the pipeline's bubble."""
    phases_s: dict[str, float]
    """By name, adding up to the step."""
    modelled: tuple[str, ...]
    """The names of the phases that are modelled; the rest is measured."""
    planned_s: float | None
    tokens_per_s: float


@dataclass(frozen=True)
class Rehearsal:
    """Everything that a rehearsal found."""

    world: int
    cluster: str
    """The cluster that the job is for, as `plan` spells it."""
    device: str
    """What the rank was run on."""
    torch: str
    ranks: tuple[RehearsedRank, ...]
    step: RehearsedStep | None
    """None if a rank ran out of memory, or not every kind of rank was run."""
    warnings: tuple[str, ...]
    limits: tuple[str, ...]
    """What a rehearsal cannot show, in sentences."""

    def to_json(self) -> dict[str, Any]:
        """As `rehearsal.json` holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Rehearsal":
        """Back from `to_json`; raises KeyError or TypeError on anything else."""
        ranks = tuple(RehearsedRank.from_json(one) for one in saved["ranks"])
        step = None if saved["step"] is None else RehearsedStep(**_tuples(saved["step"], "modelled"))
        return cls(**{**_tuples(saved, "warnings", "limits"), "ranks": ranks, "step": step})


def _tuples(saved: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**saved, **{name: tuple(saved[name]) for name in names}}
