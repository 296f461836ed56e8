"""The ranks that together hold one copy of the parameters, and operations on full matrices over them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel import ShardIndex, World

Span = tuple[slice, slice]


class Holders:
    """The ranks over which `fully_shard` and tensor parallelism distribute this rank's parameters.

    Replicas and stages hold their own parameters and are not involved: nothing crosses the links between them.
    """

    def __init__(self, world: World) -> None:
        self.device = world.device
        mesh = world.mesh
        shards, tp = (1, 1) if mesh is None else (mesh["shards"].size(), mesh["tp"].size())
        self._replicas = 1 if mesh is None else mesh["replicas"].size()
        self._size, self._rank, self._group = shards * tp, 0, None
        if mesh is None or self._size == 1:
            return
        if 1 in (shards, tp):
            self._group = mesh["tp" if shards == 1 else "shards"].get_group()
        else:
            groups = mesh.mesh.reshape(-1, self._size).tolist()
            self._group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
        self._rank = dist.get_rank(self._group)

    def copies(self, shard: ShardIndex) -> int:
        """How many of these ranks hold the same shard."""
        return shard.copies // self._replicas

    def sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Sum some tensors over these ranks, in one collective."""
        if self._size == 1 or not parts:
            return list(parts)
        flat = torch.cat([part.flatten() for part in parts]).to(self.device)
        dist.all_reduce(flat, group=self._group)
        sizes = [part.numel() for part in parts]
        return [one.view(part.shape).to(part.device) for one, part in zip(torch.split(flat, sizes), parts, strict=True)]

    def spans(self, shards: Sequence[ShardIndex]) -> list[list[Span]]:
        """For every matrix, the rows and columns each rank holds; called once, by all of these ranks."""
        edges = [(rows.start, rows.stop, columns.start, columns.stop) for rows, columns in map(span_of, shards)]
        own = torch.tensor(edges, dtype=torch.int64, device=self.device)
        everyones = [own]
        if self._size > 1:
            everyones = [torch.empty_like(own) for _ in range(self._size)]
            dist.all_gather(everyones, own, group=self._group)
        by_matrix = torch.stack(everyones, 1).tolist()
        return [[(slice(top, bottom), slice(left, right)) for top, bottom, left, right in one] for one in by_matrix]

    def on_wholes(
        self,
        locals_: Sequence[Callable[[], Tensor]],
        shapes: Sequence[tuple[int, ...]],
        spans: Sequence[list[Span]],
        functions: Sequence[Callable[[Tensor], Tensor]],
    ) -> Iterator[Tensor]:
        """This rank's shards of functions of full matrices, which the ranks process in turn.

        As many matrices as there are ranks are in flight at a time: shards go to the rank that processes the matrix,
        shards of the result come back.
        """
        if self._size == 1:
            yield from (function(make()) for make, function in zip(locals_, functions, strict=True))
            return
        for first in range(0, len(locals_), self._size):
            numbers = range(first, min(first + self._size, len(locals_)))
            sent = [locals_[number]() for number in numbers]
            mine = first + self._rank if first + self._rank in numbers else None
            arriving = [] if mine is None else spans[mine]
            parts = self._exchange(sent, [_entries(span) for span in arriving])
            returned: list[Tensor] = []
            if mine is not None:
                whole = sent[0].new_empty(shapes[mine])
                for span, part in zip(arriving, parts, strict=True):
                    whole[span] = part.view(whole[span].shape)
                result = functions[mine](whole)
                returned = [result[span] for span in arriving]
            back = self._exchange(returned, [one.numel() for one in sent], sent[0])
            yield from (part.view(one.shape) for part, one in zip(back, sent, strict=True))

    def _exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[int], like: Tensor | None = None
    ) -> list[Tensor]:
        """Send the k-th tensor to the k-th rank; `incoming` are the sizes of what the ranks send here."""
        like = outgoing[0] if like is None else like
        flat = torch.cat([like.new_empty(0), *(one.flatten() for one in outgoing)])
        arrived = flat.new_empty(sum(incoming))
        nothing = [0] * self._size
        sizes_out = [*(one.numel() for one in outgoing), *nothing][: self._size]
        sizes_in = [*incoming, *nothing][: self._size]
        dist.all_to_all_single(arrived, flat, sizes_in, sizes_out, group=self._group)
        return [arrived[start:end] for start, end in pairwise([0, *accumulate(incoming)])]


def span_of(shard: ShardIndex) -> Span:
    """The rows and columns of the full matrix that a shard covers, without padding."""
    rows, columns = shard.box()
    return rows, columns


def _entries(span: Span) -> int:
    rows, columns = span
    size: int = (rows.stop - rows.start) * (columns.stop - columns.start)
    return size
