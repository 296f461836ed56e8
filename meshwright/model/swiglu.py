"""silu(gate) × up where gate and up are the halves of one product.

The compiler's own backward writes the two gradients next to each other in one kernel that reads its inputs twice:
on an H200 twice the time of reading them once, 4% of a step of a 1B model. Hence one hand-written kernel, on GPUs only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.hardware.torch_versions import HAS_TRITON
from meshwright.model.numbers import wide_dtype


def swiglu(gate_up: Tensor) -> Tensor:
    """silu of the first half of the last dim times the second half."""
    if gate_up.is_cuda and HAS_TRITON:
        result: Tensor = _Swiglu.apply(gate_up)  # type: ignore[no-untyped-call]
        return result
    return _product(gate_up)


def swiglu_down(gate_up: Tensor, weight: Tensor) -> Tensor:
    """swiglu(gate_up) × weightᵀ. The backward, which reads gate_up anyway, computes swiglu's result again: a fifth of
    what a block would keep otherwise."""
    result: Tensor = _SwigluDown.apply(gate_up, weight)  # type: ignore[no-untyped-call]
    return result


def _product(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.library.custom_op("meshwright::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `swiglu`'s input from its result's."""
    return _launch(grad, gate_up, with_product=False)[0]


@torch.library.custom_op("meshwright::swiglu_again", mutates_args=())
def swiglu_again(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the result. One operation for the compiler, which would keep the forward's result instead."""
    return _launch(grad, gate_up, with_product=True)


@swiglu_backward.register_fake
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


@swiglu_again.register_fake
def _(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate_up, grad))  # type: ignore[return-value]


def _launch(grad: Tensor, gate_up: Tensor, *, with_product: bool) -> tuple[Tensor, Tensor]:
    if grad.is_cuda and HAS_TRITON:
        from meshwright.model.swiglu_kernel import launch

        return launch(grad.contiguous(), gate_up.contiguous(), with_product)
    wide = wide_dtype(grad.dtype)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    grad_gate, grad_up = grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu
    return torch.cat([grad_gate, grad_up], dim=-1).to(grad.dtype), (silu * up).to(grad.dtype)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _product(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        [gate_up] = ctx.saved_tensors
        result: Tensor = swiglu_backward(grad, gate_up)
        return result


class _SwigluDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return F.linear(_product(gate_up), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        grad_gate_up, product = swiglu_again(grad @ weight, gate_up)
        return grad_gate_up, grad.flatten(0, -2).t() @ product.flatten(0, -2)
