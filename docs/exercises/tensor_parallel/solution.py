"""Exercise 4, done: cut by columns. Outputs are gathered; the input's gradient is the sum of every rank's part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from toy import ToyGPT


class SumGradient(torch.autograd.Function):
    """The input unchanged; its gradient summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Gather(torch.autograd.Function):
    """The ranks' columns side by side; each rank's gradient is its own columns of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(dist.get_world_size(ctx.group), dim=-1)[dist.get_rank(ctx.group)], None


class ParallelLinear(nn.Module):
    """y = x Wᵀ + b with the rows of W (columns of Wᵀ) and the entries of b shared out."""

    def __init__(self, in_features: int, out_features: int, bias: bool, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        mine = out_features // self.ranks
        self.weight = nn.Parameter(torch.empty(mine, in_features, dtype=torch.float64))
        self.bias = nn.Parameter(torch.empty(mine, dtype=torch.float64)) if bias else None

    def load_full(self, weight: Tensor, bias: Tensor | None) -> None:
        with torch.no_grad():
            self.weight.copy_(weight.chunk(self.ranks)[self.rank])
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias.chunk(self.ranks)[self.rank])

    def forward(self, x: Tensor) -> Tensor:
        mine = nn.functional.linear(SumGradient.apply(x, self.group), self.weight, self.bias)
        whole: Tensor = Gather.apply(mine, self.group)
        return whole


def parallelise(model: ToyGPT, group: dist.ProcessGroup) -> None:
    for block in model.blocks:
        for name in ("up", "down"):
            whole = getattr(block.mlp, name)
            mine = ParallelLinear(whole.in_features, whole.out_features, whole.bias is not None, group)
            mine.load_full(whole.weight.detach(), None if whole.bias is None else whole.bias.detach())
            setattr(block.mlp, name, mine)
