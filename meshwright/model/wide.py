"""Products of bf16 matrices in float32 on tensor cores: what float32's own would give, at a fraction of their time.

A product of two bf16 numbers is exact in float32, and tensor cores add such products in float32: only results must not
be rounded. A gradient that is float32 becomes the sum of two bf16 numbers, which have 16 of its 24 bits: twice as many
as what is computed from it is rounded to. M tokens, O outputs, I inputs.
"""

from typing import Any

import torch
from torch import Tensor


def wide_product(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """x × weightᵀ of bf16 matrices in float32, with gradients in bf16."""
    out_MO: Tensor = _WideProduct.apply(x_MI, weight_OI)  # type: ignore[no-untyped-call]
    return out_MO


@torch.library.custom_op("meshwright::exact_products", mutates_args=())
def exact_products(left: Tensor, right: Tensor) -> Tensor:
    """left × right without rounding the result; one operation for the compiler."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@exact_products.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_MI, weight_OI)
        result: Tensor = exact_products(x_MI, weight_OI.t())
        return result

    @staticmethod
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor, Tensor]:
        x_MI, weight_OI = ctx.saved_tensors
        high = grad_MO.to(x_MI.dtype)
        both = torch.cat([high, (grad_MO - high.float()).to(x_MI.dtype)], dim=1)
        grad_x_MI = both @ torch.cat([weight_OI, weight_OI])
        high_OI, low_OI = exact_products(both.t(), x_MI).chunk(2)
        return grad_x_MI, (high_OI + low_OI).to(weight_OI.dtype)
