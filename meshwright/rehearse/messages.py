"""The collectives and messages of a step, counted by kind, group and size."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

import torch

from meshwright.job import Job
from meshwright.layout import axes
from meshwright.parallel import World
from meshwright.rehearse.result import Messages
from meshwright.verify.collectives import Operation, Spec

_SUFFIXES = ("_coalesced", "_single", "_tensor", "_into")


def count_messages(operations: Sequence[Operation], job: Job, world: World, steps: int = 1) -> tuple[Messages, ...]:
    """What a rank issued in some steps, per step and in the order of first issue; without objects and barriers, which
    carry nothing of the training, and without groups of one, which send nothing."""
    names = group_names(job, world)
    found: Counter[tuple[str, str, tuple[int, ...], int]] = Counter()
    for operation in operations:
        size = bytes_of(operation)
        if operation.objects or not size or len(operation.ranks) == 1:
            continue
        axis = names.get(frozenset(operation.ranks), "other")
        ranks = operation.ranks
        if operation.is_message and operation.peer is not None:
            ranks = (operation.rank, operation.peer)
        found[kind_of(operation), axis, ranks, size] += 1
    per_step = ((key, round(count / steps)) for key, count in found.items())
    return tuple(Messages(*key, count) for key, count in per_step if count)


def kind_of(operation: Operation) -> str:
    """The collective, whichever of torch's calls issued it."""
    kind = operation.kind
    for suffix in _SUFFIXES:
        kind = kind.removesuffix(suffix)
    return kind


def bytes_of(operation: Operation) -> int:
    """What the rank contributes or receives, whichever is more."""
    return max(_bytes(operation.inputs), _bytes(operation.outputs))


def _bytes(specs: Sequence[Spec]) -> int:
    return sum(spec.numel * getattr(torch, spec.dtype).itemsize for spec in specs)


def group_names(job: Job, world: World) -> Mapping[frozenset[int], str]:
    """This rank's groups by the axes that they span; the fewest axes if several names fit."""
    sizes = axes(job.layout)
    names: dict[frozenset[int], str] = {}
    if world.expert_mesh is not None:  # the ranks of experts are a part of the axes that they are taken from
        for name in ("ep", "expert_shards"):
            names[frozenset(world.expert_mesh[name].mesh.flatten().tolist())] = name
    used = [name for name, size in sizes.items() if size > 1]
    for count in range(len(used), 0, -1):
        for chosen in combinations(used, count):
            names[frozenset(_spanned(sizes, world, chosen))] = "·".join(chosen)
    names[frozenset(range(world.size))] = "world"
    if len(used) == 1:
        names[frozenset(range(world.size))] = used[0]
    return names


def _spanned(sizes: Mapping[str, int], world: World, chosen: Sequence[str]) -> Iterator[int]:
    """The ranks that differ from this one only along the chosen axes."""
    places = [range(size) if name in chosen else [world.axis_rank(name)] for name, size in sizes.items()]
    for place in product(*places):
        rank = 0
        for index, size in zip(place, sizes.values(), strict=True):
            rank = rank * size + index
        yield rank
