"""Adafactor (arXiv:1804.04235): only the row and column means of a matrix's second moment are stored.

As in the paper's Algorithm 4: the decay of the means grows with the steps, there is no first moment, and the update is
clipped at 1 and relative to the parameter's scale. The rate itself is the job's schedule. Every expert has its own
means, scale and clipping, though the experts of a layer are packed into one parameter.

N matrices in a parameter, R rows and C columns of one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel import ShardIndex
from meshwright.train.optimizer.elementwise import rows_at_once
from meshwright.train.optimizer.holders import Holders, span_of

DECAY_POWER = 0.8
"""Means over about step ** 0.8 steps."""
LEAST_SCALE = 1e-3
"""A parameter with a smaller scale than this is updated as if it had this scale."""


class Adafactor(torch.optim.Optimizer):
    """Row and column means over full matrices, summed over the ranks that share them; gradients are overwritten.

    Every rank stores the means of the full matrix, since they are small.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shards: Mapping[nn.Parameter, ShardIndex],
        holders: Holders,
        packed: Mapping[nn.Parameter, int],
        **defaults: Any,
    ) -> None:
        """`packed` says how many matrices or vectors, one after the other, a parameter consists of."""
        super().__init__(groups, defaults)
        self._shards, self._holders, self._packed = shards, holders, packed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every master that has a gradient."""
        moving = [
            (master, master.grad.to(master.dtype), group)
            for group in self.param_groups
            for master in group["params"]
            if master.grad is not None
        ]
        if not moving:
            return
        scales = self._root_mean_squares([(master, master.detach()) for master, _, _ in moving])
        sums = self._line_sums([(master, gradient) for master, gradient, _ in moving if master.dim() == 2])
        for master, gradient, group in moving:
            self._precondition(master, gradient, sums.get(master), group["eps"])
        sizes = self._root_mean_squares([(master, direction) for master, direction, _ in moving])
        for (master, direction, group), scale_N, size_N in zip(moving, scales, sizes, strict=True):
            rate_N = group["lr"] * scale_N.clamp(min=LEAST_SCALE) / size_N.clamp(min=1.0)
            direction.mul_(self._of_rows(master, rate_N))
            master.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction)

    def state_names(self, master: nn.Parameter) -> set[str]:
        """The tensors stored for a parameter."""
        return {"step", "rows", "columns"} if master.dim() == 2 else {"step", "second"}

    def _precondition(
        self, master: nn.Parameter, gradient: Tensor, sums: tuple[Tensor, Tensor] | None, eps: float
    ) -> None:
        """Update the second moment with a gradient and divide the gradient by its root, in place."""
        state, shard, matrices = self.state[master], self._shards[master], self._packed[master]
        if not state:
            self._make(state, master)
        state["step"] += 1
        weight = float(state["step"]) ** -DECAY_POWER
        if sums is None:
            state["second"].lerp_(gradient.square(), weight)
            gradient.mul_(state["second"].clamp(min=eps**2).rsqrt_())
            return
        state["rows"].lerp_(sums[0] / shard.shape[1], weight)
        state["columns"].lerp_(sums[1].flatten() / (shard.shape[0] // matrices), weight)
        rows, columns = span_of(shard)
        rows_NR = state["rows"].view(matrices, -1)
        row = (rows_NR / rows_NR.mean(1, keepdim=True).clamp(min=eps**2)).flatten()[rows]
        columns_NC = state["columns"].view(matrices, -1)[:, columns]
        for some, owners in self._runs(master):
            moment = row[some].view(-1, _length(some, owners), 1) * columns_NC[owners].unsqueeze(1)
            gradient[some].mul_(moment.flatten(0, 1).clamp_(min=eps**2).rsqrt_())

    def _make(self, state: dict[str, Tensor], master: nn.Parameter) -> None:
        shape, matrices = self._shards[master].shape, self._packed[master]
        state["step"] = torch.zeros((), dtype=torch.int64)
        if master.dim() == 2:
            # Flat, so that no state looks like a shard of its parameter.
            state["rows"], state["columns"] = master.new_zeros(shape[0]), master.new_zeros(matrices * shape[1])
        else:
            state["second"] = torch.zeros_like(master)

    def _line_sums(self, matrices: Sequence[tuple[nn.Parameter, Tensor]]) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """For each full parameter, the sums of its squared gradient along all rows, and along the columns of each of
        its matrices."""
        parts = []
        for master, gradient in matrices:
            shard = self._shards[master]
            copies, (rows, columns) = self._holders.copies(shard), span_of(shard)
            along_rows = gradient.new_zeros(shard.shape[0])
            along_columns_NC = gradient.new_zeros(self._packed[master], shard.shape[1])
            own_rows, own_columns_NC = along_rows[rows], along_columns_NC[:, columns]
            for some, owners in self._runs(master):
                squares = gradient[some].square()
                own_rows[some] = squares.sum(1) / copies
                own_columns_NC[owners] += squares.view(-1, _length(some, owners), squares.shape[1]).sum(1) / copies
            parts += [along_rows, along_columns_NC]
        summed = self._holders.sum(parts)
        return {master: (summed[2 * i], summed[2 * i + 1]) for i, (master, _) in enumerate(matrices)}

    def _root_mean_squares(self, values: Sequence[tuple[nn.Parameter, Tensor]]) -> list[Tensor]:
        """Root mean squares of every matrix of the full parameters, of which `values` are shards."""
        squares = [self._squares(master, value) for master, value in values]
        sizes = [prod(self._shards[master].shape) // self._packed[master] for master, _ in values]
        return [(sum_N / size).sqrt() for sum_N, size in zip(self._holders.sum(squares), sizes, strict=True)]

    def _squares(self, master: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's share of the sum of squares of every matrix."""
        shard, matrices = self._shards[master], self._packed[master]
        copies = self._holders.copies(shard)
        if matrices == 1:
            norm: Tensor = torch.linalg.vector_norm(value)
            return norm.square().view(1) / copies
        of_rows = value.new_zeros(shard.shape[0])
        norms = torch.linalg.vector_norm(value, dim=1) if value.dim() > 1 else value
        of_rows[shard.box()[0]] = norms.square() / copies
        return of_rows.view(matrices, -1).sum(1)

    def _of_rows(self, master: nn.Parameter, values_N: Tensor) -> Tensor:
        """A value of every matrix, for the rows that this rank holds of it."""
        shard, matrices = self._shards[master], self._packed[master]
        if matrices == 1:
            return values_N
        own = values_N.repeat_interleave(shard.shape[0] // matrices)[shard.box()[0]]
        return own.view(-1, *[1] * (master.dim() - 1))

    def _runs(self, master: nn.Parameter) -> Iterator[tuple[slice, slice]]:
        """This rank's rows in runs, each some rows of one matrix or some whole matrices, with their numbers."""
        rows, _ = span_of(self._shards[master])
        height, at_once = self._shards[master].shape[0] // self._packed[master], rows_at_once(master)
        first = rows.start
        while first < rows.stop:
            matrix, inside = divmod(first, height)
            whole = 0 if inside else min(rows.stop - first, at_once) // height
            last = first + whole * height if whole else min(first - inside + height, rows.stop, first + at_once)
            yield slice(first - rows.start, last - rows.start), slice(matrix, matrix + max(whole, 1))
            first = last


def _length(some: slice, owners: slice) -> int:
    """Rows of one matrix in a run."""
    return int((some.stop - some.start) // (owners.stop - owners.start))
