"""The ranks that together hold one copy of the parameters, and operations on full matrices over them."""

import math
from collections.abc import Callable, Iterator, Sequence

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

    @property
    def alone(self) -> bool:
        """Whether this rank holds all parameters itself."""
        return self._size == 1

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
        locals_: Callable[[Sequence[int]], Sequence[Tensor]],
        shapes: Sequence[tuple[int, ...]],
        spans: Sequence[list[Span]],
        function: Callable[[Sequence[int], Sequence[Tensor]], Sequence[Tensor]],
        entries_at_once: int,
    ) -> Iterator[tuple[Sequence[int], Sequence[Tensor]]]:
        """This rank's shards of a function of full matrices, some matrices at a time, each with its number.

        The ranks divide the matrices: shards go to the rank that processes a matrix, shards of the result come back.
        A rank has as many in flight as together have `entries_at_once` entries, at least one, and `function` gets all
        of them in one call.
        """
        first = 0
        while first < len(shapes):
            each = max(1, entries_at_once // max(1, math.prod(shapes[first])))
            numbers = range(first, min(first + each * self._size, len(shapes)))
            first = numbers.stop
            shards = locals_(numbers)
            if self._size == 1:
                yield numbers, function(numbers, shards)
                continue
            mine, ranks = numbers[self._rank :: self._size], range(self._size)
            sizes = [[_entries(spans[number][rank]) for number in mine] for rank in ranks]
            arrived = self._exchange([shards[rank :: self._size] for rank in ranks], sizes, shards[0])
            wholes = [shards[0].new_empty(shapes[number]) for number in mine]
            for rank in ranks:
                for number, whole, part in zip(mine, wholes, arrived[rank], strict=True):
                    span = spans[number][rank]
                    whole[span] = part.view(whole[span].shape)
            results = function(mine, wholes)
            returned = [
                [result[spans[number][rank]] for number, result in zip(mine, results, strict=True)] for rank in ranks
            ]
            sizes = [[shard.numel() for shard in shards[rank :: self._size]] for rank in ranks]
            back = self._exchange(returned, sizes, shards[0])
            yield numbers, [back[i % self._size][i // self._size].view(one.shape) for i, one in enumerate(shards)]

    def _exchange(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[int]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send the k-th tensors to the k-th rank; `incoming` are the sizes of what each rank sends here."""
        flat = torch.cat([like.new_empty(0), *(one.flatten() for ones in outgoing for one in ones)])
        sizes_out = [sum(one.numel() for one in ones) for ones in outgoing]
        sizes_in = [sum(sizes) for sizes in incoming]
        arrived = flat.new_empty(sum(sizes_in))
        dist.all_to_all_single(arrived, flat, sizes_in, sizes_out, group=self._group)
        by_rank = torch.split(arrived, sizes_in)
        return [list(torch.split(part, list(sizes))) for part, sizes in zip(by_rank, incoming, strict=True)]


def span_of(shard: ShardIndex) -> Span:
    """The rows and columns of the full matrix that a shard covers, without padding."""
    rows, columns = shard.box()
    return rows, columns


def _entries(span: Span) -> int:
    rows, columns = span
    size: int = (rows.stop - rows.start) * (columns.stop - columns.start)
    return size
