"""Gradients between replicas, compressed, with what was not sent kept for the next step.

The ranks of a replica reduce over their shards first (torch's `fully_shard`); the rest happens here, on a rank's local
shards, once a step and after the backward. All replicas compute their sum from the same bytes, so they cannot diverge.
What an encoding loses stays in the memory of the rank that encoded, and joins its gradient at the next step: the
replicas' memories and the sum always add up to what the gradients and memories were.

Bytes a rank sends of a bucket of E encoded bytes, n replicas: 2·(n−1)/n·E, as a ring all-reduce would of the plain one;
topk, whose entries differ on every rank, (n−1)·E.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.job.devices import Layout
from meshwright.model.numbers import wide_dtype
from meshwright.parallel.compression.buckets import Bucket, Gathered, LowRank, Owned, Plain, alike, first_start, pays
from meshwright.parallel.compression.codecs import Cast, Codec, Int8, TopK
from meshwright.parallel.compression.replicas import Replicas, cut
from meshwright.parallel.weights import Weights

IN_FLIGHT = 3
"""Buckets worked on at once: one is encoded while others are on the wire."""


@dataclass(frozen=True)
class Sent:
    """What this rank sent to other replicas in a step."""

    bytes: int
    """Indices and scales included."""
    plain_bytes: int
    """What a ring all-reduce of the same gradients would have sent."""

    @property
    def ratio(self) -> float:
        """How many times less was sent; 1 on a pipeline stage with nothing to send."""
        return self.plain_bytes / self.bytes if self.bytes else 1.0


class Reduction:
    """The sum of gradients over replicas, with a memory of what was left out."""

    memories: dict[str, Tensor]
    """What this rank has not sent yet, by parameter: to be saved with the weights. Over all replicas it is the sum that
    counts, so a different number of them may redistribute it."""
    starts: dict[str, Tensor]
    """powersgd: where the search for the next step's directions starts, by parameter; equal on all replicas."""
    sent: Sent | None = None
    """Of the last step."""

    def __init__(self, masters: Mapping[str, Tensor], layout: Layout, group: dist.ProcessGroup) -> None:
        self._group, self._after = group, layout.compress_after
        self.step = self._after + 1
        """Which step it is: the first layout.compress_after are summed as they are."""
        self.replica, self.replicas = dist.get_rank(group), dist.get_world_size(group)
        limit_bytes = int(layout.bucket_mb * 1e6)
        self._uncompressed = [Plain(slices) for slices in cut(masters, limit_bytes)]
        self._buckets: list[Bucket] = []
        self.starts = {}
        if layout.compress == "powersgd":
            rank = layout.compress_rank
            matrices = {name: master for name, master in masters.items() if pays(master, rank)}
            self.memories = _zeros(matrices)
            self.starts = {name: first_start(name, matrix, rank) for name, matrix in matrices.items()}
            self._buckets += [LowRank(names, self.memories, self.starts) for names in alike(matrices, limit_bytes)]
            rest = {name: master for name, master in masters.items() if name not in matrices}
            self._buckets += [Plain(slices) for slices in cut(rest, limit_bytes)]
        else:
            codec = make_codec(layout)
            self.memories = _zeros(masters)
            kind = Gathered if layout.compress == "topk" else Owned
            self._buckets += [kind(slices, codec, self.memories) for slices in cut(masters, limit_bytes)]

    @torch.no_grad()
    def reduce(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Replace every master's gradient by the sum over all replicas."""
        # Every replica issues the same collectives, whatever it has gradients for: missing ones are zeros.
        gradients = {
            name: torch.zeros_like(master) if master.grad is None else master.grad for name, master in masters.items()
        }
        replicas = Replicas(self._group)
        buckets = self._buckets if self.step > self._after else self._uncompressed
        waiting = deque(bucket.reduce(gradients, replicas) for bucket in buckets)
        running: deque[Iterator[None]] = deque()
        # Buckets take turns in an order independent of timing: a collective must match those of the other ranks.
        while waiting or running:
            while waiting and len(running) < IN_FLIGHT:
                running.append(waiting.popleft())
                next(running[-1])
            bucket = running.popleft()
            if next(bucket, _ENDED) is not _ENDED:
                running.append(bucket)
        plain_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients.values())
        self.sent = Sent(replicas.sent_bytes, replicas.ring_bytes(plain_bytes))

    def forget(self) -> None:
        """Drop what was not sent."""
        for memory in self.memories.values():
            memory.zero_()


_ENDED = object()


class CompressedWeights(Weights):
    """Weights whose gradients, summed within a replica, are summed over the replicas by a `Reduction`."""

    def __init__(self, inner: Weights, layout: Layout, group: dist.ProcessGroup) -> None:
        self._inner = inner
        self.masters, self.frozen, self.frozen_shards = inner.masters, inner.frozen, inner.frozen_shards
        self.reduction: Reduction = Reduction(self.masters, layout, group)
        replicas, replica = dist.get_world_size(group), dist.get_rank(group)
        self._shards = {
            name: replace(p, copies=p.copies * replicas, holder=p.holder + p.copies * replica)
            for name, p in inner.shards().items()
        }

    def start_step(self, step: int) -> None:
        """The first layout.compress_after steps are summed as they are."""
        self.reduction.step = step

    def start_micro_batch(self, last: bool) -> None:
        """As without compression."""
        self._inner.start_micro_batch(last)

    def collect_gradients(self) -> None:
        """Give the masters their gradients and sum those over the replicas."""
        self._inner.collect_gradients()
        self.reduction.reduce(self.masters)

    def refresh(self) -> None:
        """As without compression."""
        self._inner.refresh()

    def zero_gradients(self) -> None:
        """As without compression."""
        self._inner.zero_gradients()


def _zeros(masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(master, dtype=wide_dtype(master.dtype)).detach() for name, master in masters.items()}


def make_codec(layout: Layout) -> Codec:
    """The encoding of blocks that layout.compress names."""
    match layout.compress:
        case "bf16":
            return Cast(torch.bfloat16)
        case "fp16":
            return Cast(torch.float16)
        case "int8":
            return Int8()
        case "topk":
            return TopK(layout.compress_ratio)
    raise ValueError(f"layout.compress = {layout.compress} encodes no blocks")
