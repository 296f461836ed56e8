"""The distinct calls of a layout, as a group of one rank can issue them.

What one rank holds by itself keeps its dtype, shape and contiguity; what has a part for every rank of the group is as
large as one part. NCCL accepts or refuses a call for its arguments, so equal calls are counted and kept once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.verify.collectives.record import Operation, Record, Spec

MESSAGES = "messages"
"""The kind of a call that stands for a batch of sends and receives, or for a single one."""

_FROM_INPUT = {
    "all_gather", "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "gather", "gather_into_tensor",
    "all_to_all", "all_to_all_single",
}  # fmt: skip
"""Kinds in which what a rank puts in is its own part."""
_FROM_OUTPUT = {"reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "scatter"}
_LISTS = {"all_gather", "gather", "all_to_all", "reduce_scatter", "scatter"}
"""Kinds that take a list with a tensor for each rank."""


@dataclass(frozen=True)
class Call:
    """A collective on a group of one rank, or messages of a rank to itself."""

    kind: str
    inputs: tuple[Spec, ...] = ()
    outputs: tuple[Spec, ...] = ()
    """As many as inputs; none where the call works in place."""
    reduce: str | None = None
    splits: bool = False
    """Whether an all_to_all_single names the rows of each rank."""
    asynchronous: bool = False

    def __str__(self) -> str:
        words = [self.kind, *([self.reduce] if self.reduce else []), ", ".join(dict.fromkeys(map(str, self.inputs)))]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Origin:
    """Where a distinct call comes from."""

    site: str
    """The line of code that issued it first."""
    times: int
    """How often all ranks issued it."""
    layout: str = ""
    """The first layout of several that issued it."""


@dataclass(frozen=True)
class Calls:
    """What a layout, or several, ask of a communication library."""

    origins: dict[Call, Origin]
    on_cpu: int = 0
    """Operations left out because their tensors are on the CPU in every job: pickled objects."""
    groups: int = 0
    """The most process groups that a rank of one layout is part of."""

    def named(self, layout: str) -> "Calls":
        """The same with the name of their layout."""
        return replace(self, origins={call: replace(origin, layout=layout) for call, origin in self.origins.items()})


def distinct(records: Sequence[Record]) -> Calls:
    """The distinct calls of all ranks of a layout."""
    on_gpu = any(spec.device != "cpu" for record in records for op in record.operations for spec in op.tensors)
    first, times, on_cpu = dict[Call, str](), Counter[Call](), 0
    for record in records:
        batches = defaultdict[int, list[Operation]](list)
        for operation in record.operations:
            if operation.objects or (on_gpu and any(spec.device == "cpu" for spec in operation.tensors)):
                on_cpu += 1
            elif operation.batch is not None:
                batches[operation.batch].append(operation)
            else:
                _count(one_rank([operation]), operation.site, first, times)
        for operations in batches.values():
            _count(one_rank(operations), operations[0].site, first, times)
    groups = max((sum(record.rank in made.ranks for made in record.creations) for record in records), default=0)
    return Calls({call: Origin(first[call], times[call]) for call in first}, on_cpu, groups)


def merged(several: Iterable[Calls]) -> Calls:
    """The distinct calls of several layouts; each keeps its first origin."""
    origins, on_cpu, groups = dict[Call, Origin](), 0, 0
    for calls in several:
        for call, origin in calls.origins.items():
            known = origins.get(call)
            origins[call] = origin if known is None else replace(known, times=known.times + origin.times)
        on_cpu, groups = on_cpu + calls.on_cpu, max(groups, calls.groups)
    return Calls(origins, on_cpu, groups)


def one_rank(operations: Sequence[Operation]) -> Call:
    """An operation, or a batch of messages, as a rank that is alone in its group would issue it."""
    operation = operations[0]
    if operation.is_message and operation.kind != "recv_anysource":
        carried = sorted((_plain(spec) for each in operations for spec in each.tensors), key=repr)
        return Call(MESSAGES, tuple(carried), asynchronous=any(each.asynchronous for each in operations))
    kind, inputs, outputs = operation.kind, tuple(map(_plain, operation.inputs)), tuple(map(_plain, operation.outputs))
    if kind in _FROM_INPUT or (kind == "scatter" and not outputs):
        outputs = _like(inputs, outputs or inputs, kind)
    elif kind in _FROM_OUTPUT:
        inputs = _like(outputs, inputs or outputs, kind)
    return Call(
        kind,
        inputs,
        outputs,
        operation.reduce,
        splits=operation.splits is not None and any(operation.splits),
        asynchronous=operation.asynchronous,
    )


def _count(call: Call, site: str, first: dict[Call, str], times: Counter[Call]) -> None:
    first.setdefault(call, site)
    times[call] += 1


def _plain(spec: Spec) -> Spec:
    return replace(spec, device="cuda")


def _like(own: tuple[Spec, ...], others: tuple[Spec, ...], kind: str) -> tuple[Spec, ...]:
    """The other side of a call in the shape of its own; each keeps its dtype and contiguity."""
    if kind in _LISTS:
        others = others[: len(own)]
    return tuple(replace(other, shape=mine.shape) for mine, other in zip(own, others, strict=True))
