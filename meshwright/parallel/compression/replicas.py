"""The ranks that hold the same shards, what they send each other, and which gradients are sent together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.world import all_gather


class Replicas:
    """Asynchronous collectives over the replicas of a shard, and the bytes this rank sent in them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0

    def exchange(self, payload: Tensor) -> tuple[Tensor, dist.Work]:
        """The r-th of equal parts to replica r; returns theirs for this rank, in the order of replicas."""
        arriving = torch.empty_like(payload)
        self.sent_bytes += _bytes(payload) * (self.size - 1) // self.size
        return arriving, _started(dist.all_to_all_single(arriving, payload, group=self._group, async_op=True))

    def gather(self, payload: Tensor) -> tuple[Tensor, dist.Work]:
        """All replicas' payloads, in the order of replicas."""
        arriving = payload.new_empty(self.size * len(payload), *payload.shape[1:])
        self.sent_bytes += _bytes(payload) * (self.size - 1)
        return arriving, _started(all_gather(arriving, payload, group=self._group, async_op=True))

    def sum(self, values: Tensor) -> dist.Work:
        """Sum in place."""
        self.sent_bytes += self.ring_bytes(_bytes(values))
        return _started(dist.all_reduce(values, group=self._group, async_op=True))

    def ring_bytes(self, size_bytes: int) -> int:
        """What each rank of a ring sends for an all-reduce."""
        return 2 * (self.size - 1) * size_bytes // self.size


@dataclass(frozen=True)
class Slice:
    """Some of a parameter's entries, in storage order."""

    name: str
    start: int
    stop: int


def cut(tensors: Mapping[str, Tensor], limit_bytes: int) -> Iterator[list[Slice]]:
    """All entries of some tensors in groups of at most a size; large tensors are spread over several."""
    room, group = limit_bytes, list[Slice]()
    for name, tensor in tensors.items():
        width, start = tensor.element_size(), 0
        while start < tensor.numel():
            stop = min(tensor.numel(), start + max(1, room // width))
            group.append(Slice(name, start, stop))
            room, start = room - (stop - start) * width, stop
            if room < width:
                yield group
                room, group = limit_bytes, []
    if group:
        yield group


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None is for ranks outside of the group
    return work
