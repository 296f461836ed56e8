"""RMSNorm over the last dim, and which norm a shape has."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.model.numbers import wide_dtype


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) × weight, in float32 or wider, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # The fused CUDA kernel keeps x and one statistic a row; torch's CPU path would keep two wide copies of x. The
        # compiler decides itself what to keep.
        if x.is_cuda or torch.compiler.is_compiling():
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


def make_norm(shape: Model) -> RMSNorm | nn.LayerNorm:
    """The norm this shape puts before its blocks' halves and before its head."""
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.width, eps=shape.norm_eps)
    return RMSNorm(shape.width, shape.norm_eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x.dtype))
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        grad = grads[0].to(rstd.dtype)
        normed = x.to(rstd.dtype) * rstd
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).sum(tuple(range(x.dim() - 1))).to(weight.dtype)
        grad_normed = grad * weight
        share = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = grad_normed.sub_(normed.mul_(share)).mul_(
            rstd
        )  # in place: on a CPU passes over memory dominate the cost
        return grad_x.to(x.dtype), grad_weight, None
