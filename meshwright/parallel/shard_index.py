"""Where a rank's shard is in the whole parameter: by index, whatever mix of shardings produced it.

Torch can assemble sharded tensors itself, but only with collectives and not for every uneven mix of tensor-parallel and
data-parallel sharding; plain indices work for initialisation, comparison and saving, and for every mix.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class ShardIndex:
    """Rows and columns of the whole that a local tensor holds; rows past the whole's end are padding."""

    rows: Tensor
    columns: Tensor | None
    """None holds every column (and for vectors)."""
    shape: tuple[int, ...]
    """Of the whole parameter, without padding."""
    copies: int
    """How many ranks hold this same shard."""
    holder: int = 0
    """Which of those ranks this one is."""

    def box(self) -> tuple[slice, ...]:
        """The shard as slices of the whole, without padding: however it was sharded, its rows and columns are
        contiguous."""
        rows = _run(self.rows)
        inside = slice(min(rows.start, self.shape[0]), min(rows.stop, self.shape[0]))
        if len(self.shape) == 1:
            return (inside,)
        columns = slice(0, self.shape[1]) if self.columns is None else _run(self.columns)
        return inside, columns, *(slice(0, size) for size in self.shape[2:])

    def take(self, whole: Tensor) -> Tensor:
        """The shard's values out of a whole tensor; padding rows become zero."""
        inside = self.rows < self.shape[0]
        taken = whole[self.rows.clamp(max=self.shape[0] - 1)]
        if self.columns is not None:
            taken = taken[:, self.columns]
        return torch.where(inside.view(-1, *[1] * (taken.dim() - 1)), taken, 0)

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Write the shard's values into a whole tensor, leaving padding rows out."""
        inside = self.rows < self.shape[0]
        if self.columns is None:
            whole[self.rows[inside]] = local[inside]
        else:
            whole[self.rows[inside].unsqueeze(1), self.columns.unsqueeze(0)] = local[inside]


def shard_index_of(parameter: Tensor, shape: tuple[int, ...]) -> ShardIndex:
    """The shard a parameter's local tensor is, for the unpadded `shape` of the whole."""
    rows = torch.arange(parameter.shape[0])
    columns = torch.arange(parameter.shape[1]) if parameter.dim() > 1 else None
    whole_columns, copies, holder = True, 1, 0
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        # The innermost axis (tensor parallelism) sharded first; data parallelism then sharded the result.
        for axis in reversed(range(mesh.ndim)):
            size, place = mesh.size(axis), mesh.get_local_rank(axis)
            if isinstance(placements[axis], Replicate):
                holder += copies * place
                copies *= size
            elif cast(Shard, placements[axis]).dim == 0:
                rows = _chunk(rows, size, place)
            else:
                assert columns is not None
                columns, whole_columns = _chunk(columns, size, place), False
    return ShardIndex(rows, None if whole_columns else columns, shape, copies, holder)


def _chunk(index: Tensor, count: int, place: int) -> Tensor:
    """The place-th of torch.chunk's shards, empty past the last one: uneven shards are split this way everywhere."""
    chunks = index.chunk(count)
    return chunks[place] if place < len(chunks) else index[:0]


def _run(index: Tensor) -> slice:
    if not len(index):
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    assert last - first + 1 == len(index), "a shard's rows and columns are neighbours"
    return slice(first, last + 1)
