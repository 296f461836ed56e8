"""Rows of tokens for experts: gathered, weighted and added up again, on a GPU in one pass over memory each.

A gather's gradient is a sum over a token's rows and the sum's is a gather: neither adds to memory in an order that
depends on timing. T tokens, K experts of a token, R rows sorted by expert (T × K), D width, F an expert's inner width.
order_R gives each row's slot, token × K + place among the token's experts; place_TK is its inverse.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.hardware.torch_versions import HAS_TRITON
from meshwright.model.swiglu import swiglu


def has_kernels(x: Tensor) -> bool:
    """Whether kernels can be launched for a tensor."""
    return x.is_cuda and HAS_TRITON


def gathered(x_TD: Tensor, order_R: Tensor, place_TK: Tensor) -> Tensor:
    """Every token once for each of its experts, sorted by expert."""
    rows_RD: Tensor = _Gathered.apply(x_TD, order_R, place_TK)  # type: ignore[no-untyped-call]
    return rows_RD


def summed(rows_RD: Tensor, order_R: Tensor, place_TK: Tensor) -> Tensor:
    """The sum of each token's rows."""
    out_TD: Tensor = _Summed.apply(rows_RD, order_R, place_TK)  # type: ignore[no-untyped-call]
    return out_TD


def weighted_sum(rows_RD: Tensor, weights_TK: Tensor, order_R: Tensor, place_TK: Tensor) -> Tensor:
    """The weighted sum of each token's rows; only where there are kernels."""
    out_TD: Tensor = _WeightedSum.apply(rows_RD, weights_TK, order_R, place_TK)  # type: ignore[no-untyped-call]
    return out_TD


def weighted_swiglu(gate_up: Tensor, weights_TK: Tensor, order_R: Tensor) -> Tensor:
    """silu(gate) × up, the halves of each row, times the row's weight."""
    if has_kernels(gate_up):
        inner_RF: Tensor = _WeightedSwiglu.apply(gate_up, weights_TK, order_R)  # type: ignore[no-untyped-call]
        return inner_RF
    return (swiglu(gate_up) * weights_TK.flatten()[order_R].unsqueeze(1)).to(gate_up.dtype)


def _gather(x_TD: Tensor, order_R: Tensor, place_TK: Tensor) -> Tensor:
    if not has_kernels(x_TD):
        return x_TD[order_R // place_TK.shape[1]]
    from meshwright.model.rows_kernel import gather

    return gather(x_TD.contiguous(), order_R, place_TK.shape[1])


def _sum(rows_RD: Tensor, place_TK: Tensor) -> Tensor:
    if not has_kernels(rows_RD):
        return rows_RD[place_TK].sum(1)
    from meshwright.model.rows_kernel import total

    return total(rows_RD.contiguous(), place_TK, None)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return _gather(x_TD, order_R, place_TK)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        [place_TK] = ctx.saved_tensors
        return _sum(grad_RD, place_TK), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(order_R, place_TK)
        return _sum(rows_RD, place_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        order_R, place_TK = ctx.saved_tensors
        return _gather(grad_TD, order_R, place_TK), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor, order_R: Tensor, place_TK: Tensor) -> Tensor:
        from meshwright.model.rows_kernel import total

        rows_RD, weights_TK = rows_RD.contiguous(), weights_TK.contiguous()
        ctx.save_for_backward(rows_RD, weights_TK, order_R)
        return total(rows_RD, place_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from meshwright.model.rows_kernel import total_backward

        grad_rows_RD, grad_weights_TK = total_backward(grad_TD.contiguous(), *ctx.saved_tensors)
        return grad_rows_RD, grad_weights_TK, None, None


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights_TK: Tensor, order_R: Tensor) -> Tensor:
        from meshwright.model.rows_kernel import swiglu

        gate_up, weights_TK = gate_up.contiguous(), weights_TK.contiguous()
        ctx.save_for_backward(gate_up, weights_TK, order_R)
        return swiglu(gate_up, weights_TK, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor, None]:
        from meshwright.model.rows_kernel import swiglu_backward

        grad_gate_up, grad_weights_TK = swiglu_backward(grad_RF.contiguous(), *ctx.saved_tensors)
        return grad_gate_up, grad_weights_TK, None
