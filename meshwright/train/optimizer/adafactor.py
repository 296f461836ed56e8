"""Adafactor (arXiv:1804.04235): only the row and column means of a matrix's second moment are stored.

As in the paper's Algorithm 4: the decay of the means grows with the steps, there is no first moment, and the update is
clipped at 1 and relative to the parameter's scale. The rate itself is the job's schedule.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel import ShardIndex
from meshwright.train.optimizer.elementwise import row_spans
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
        self, groups: list[dict[str, Any]], shards: Mapping[nn.Parameter, ShardIndex], holders: Holders, **defaults: Any
    ) -> None:
        super().__init__(groups, defaults)
        self._shards, self._holders = shards, holders

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
        shards = [self._shards[master] for master, _, _ in moving]
        scales = self._root_mean_squares([master for master, _, _ in moving], shards)
        sums = self._line_sums([(master, gradient) for master, gradient, _ in moving if master.dim() == 2])
        for master, gradient, group in moving:
            self._precondition(master, gradient, sums.get(master), group["eps"])
        sizes = self._root_mean_squares([direction for _, direction, _ in moving], shards)
        for (master, direction, group), scale, size in zip(moving, scales, sizes, strict=True):
            rate = group["lr"] * scale.clamp(min=LEAST_SCALE) / size.clamp(min=1.0)
            master.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction.mul_(rate))

    def state_names(self, master: nn.Parameter) -> set[str]:
        """The tensors stored for a parameter."""
        return {"step", "rows", "columns"} if master.dim() == 2 else {"step", "second"}

    def _precondition(
        self, master: nn.Parameter, gradient: Tensor, sums: tuple[Tensor, Tensor] | None, eps: float
    ) -> None:
        """Update the second moment with a gradient and divide the gradient by its root, in place."""
        state, shard = self.state[master], self._shards[master]
        if not state:
            self._make(state, master, shard)
        state["step"] += 1
        weight = float(state["step"]) ** -DECAY_POWER
        if sums is None:
            state["second"].lerp_(gradient.square(), weight)
            gradient.mul_(state["second"].clamp(min=eps**2).rsqrt_())
            return
        state["rows"].lerp_(sums[0] / shard.shape[1], weight)
        state["columns"].lerp_(sums[1] / shard.shape[0], weight)
        rows, columns = span_of(shard)
        row = state["rows"][rows] / state["rows"].mean().clamp(min=eps**2)
        column = state["columns"][columns]
        for some in row_spans(gradient[: len(row)]):
            moment = row[some].unsqueeze(1) * column
            gradient[some].mul_(moment.clamp_(min=eps**2).rsqrt_())

    def _make(self, state: dict[str, Tensor], master: nn.Parameter, shard: ShardIndex) -> None:
        state["step"] = torch.zeros((), dtype=torch.int64)
        if master.dim() == 2:
            state["rows"], state["columns"] = master.new_zeros(shard.shape[0]), master.new_zeros(shard.shape[1])
        else:
            state["second"] = torch.zeros_like(master)

    def _line_sums(self, matrices: Sequence[tuple[nn.Parameter, Tensor]]) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """For each full matrix, the sums of its squared gradient along rows and along columns."""
        parts = []
        for master, gradient in matrices:
            shard = self._shards[master]
            copies, (rows, columns) = self._holders.copies(shard), span_of(shard)
            along_rows, along_columns = gradient.new_zeros(shard.shape[0]), gradient.new_zeros(shard.shape[1])
            own_rows, own_columns = along_rows[rows], along_columns[columns]
            for some in row_spans(gradient[: len(own_rows)]):
                squares = gradient[some].square()
                own_rows[some] = squares.sum(1) / copies
                own_columns += squares.sum(0) / copies
            parts += [along_rows, along_columns]
        summed = self._holders.sum(parts)
        return {master: (summed[2 * i], summed[2 * i + 1]) for i, (master, _) in enumerate(matrices)}

    def _root_mean_squares(self, values: Sequence[Tensor], shards: Sequence[ShardIndex]) -> list[Tensor]:
        """Root mean squares of the full tensors of which `values` are shards."""
        norms = torch.stack([torch.linalg.vector_norm(value) for value in values])
        shares = torch.tensor([self._holders.copies(p) for p in shards], dtype=norms.dtype, device=norms.device)
        counts = torch.tensor([prod(p.shape) for p in shards], dtype=norms.dtype, device=norms.device)
        [squares] = self._holders.sum([norms.square() / shares])
        return list((squares / counts).sqrt())
