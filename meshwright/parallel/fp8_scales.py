"""fp8 products with finer scales than one per tensor: one per row ("row"), or per 128 numbers ("block").

An operand's rows run along the dim that is summed over, so a scale can be taken out of the sum, or of 128 terms of it.
The three products of a linear sum over inputs, outputs and tokens: each quantises its operands anew, from the bf16
tensors that are kept. "row" has one scale per row of both operands. "block" follows DeepSeek-V3 (arXiv:2412.19437,
section 3.3.2): 1 × 128 numbers of activations and gradients have a scale, 128 × 128 of weights. Everything is e4m3,
gradients too: numbers that share a scale differ less, and need precision more than range.
M tokens, N outputs, K inputs.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.torch_private.arithmetic import blockwise_mm, scaled_mm
from meshwright.torch_private.autograd import takes_context

NARROW = torch.float8_e4m3fn
BLOCK = 128


class Operand(NamedTuple):
    """A matrix in fp8, as products read it: `values` × `scales`, each scale for a block of equal size."""

    values: Tensor
    """Whole blocks: zeros follow where the matrix has fewer numbers."""
    scales: Tensor
    size: int
    """Its rows without those zeros."""


def by_row(x: Tensor) -> Operand:
    """One scale per row."""
    return _quantise(x, 1, x.shape[1])


def by_line(x: Tensor) -> Operand:
    """One scale per 128 numbers of a row."""
    return _quantise(x, 1, BLOCK)


def by_square(x: Tensor) -> Operand:
    """One scale per 128 × 128 numbers."""
    return _quantise(x, BLOCK, BLOCK)


WAYS = {"row": (by_row, by_row), "block": (by_line, by_square)}
"""How activations and gradients, and how weights are quantised, by precision.fp8_scales."""


class Cast(NamedTuple):
    """A weight in fp8 as its two products read it: by inputs, and transposed, by outputs."""

    values: Tensor
    scales: Tensor
    turned: Tensor
    turned_scales: Tensor


def fine_cast(weight_NK: Tensor, scales: str) -> Cast:
    """A weight with scales by row or by block."""
    _, of_weights = WAYS[scales]
    plain, turned = of_weights(weight_NK), of_weights(weight_NK.t())
    return Cast(plain.values, plain.scales, turned.values, turned.scales)


def fine_product(x_MK: Tensor, weight_NK: Tensor, scales: str, cast: Cast | None = None) -> Tensor:
    """x × weightᵀ, and gradients, with scales by row or by block; `cast` is the weight in fp8, if it is there."""
    out_MN: Tensor = _FineProduct.apply(x_MK, weight_NK, scales, *(cast or ()))  # type: ignore[no-untyped-call]
    return out_MN


def multiply(left: Operand, right: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """left × rightᵀ."""
    out: Tensor = scaled_product(left.values, right.values, left.scales, right.scales, dtype, fast)
    # Not `.contiguous()` of all of it: torch 2.11's compiler gives zero gradients for a function whose forward ends
    # with a conversion that changes nothing.
    padded = tuple(out.shape) != (left.size, right.size)
    return out[: left.size, : right.size].contiguous() if padded else out


@torch.library.custom_op("meshwright::scaled_product", mutates_args=())
def scaled_product(
    left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """left × rightᵀ of operands in fp8, summed in float32.

    Opaque to the compiler, which in some versions of torch reads blocks' scales in another order than the GPU's kernel.
    """
    if not left.is_cuda:
        return exact_product(left, right, left_scales, right_scales, dtype)
    if left_scales.shape[1] == right_scales.shape[1] == 1 and right_scales.shape[0] == right.shape[0]:
        return scaled_mm(left, right.t(), left_scales, right_scales.t(), out_dtype=dtype, use_fast_accum=fast)
    return blockwise_mm(left, right, left_scales, right_scales, dtype)


@scaled_product.register_fake
def _(left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=dtype)


def exact_product(left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same from the numbers that fp8 values stand for: what a CPU computes, since torch has no kernel for it."""
    return (_dequantise(left, left_scales) @ _dequantise(right, right_scales).t()).to(dtype)


def _dequantise(values: Tensor, scales: Tensor) -> Tensor:
    down, across = (size // count for size, count in zip(values.shape, scales.shape, strict=True))
    return values.float() * scales.repeat_interleave(down, 0).repeat_interleave(across, 1)


def _quantise(x: Tensor, down: int, across: int) -> Operand:
    """x in blocks of down × across numbers: the largest of each becomes the format's largest."""
    rows, columns = x.shape
    if columns % across or rows % down:
        x = F.pad(x, (0, -columns % across, 0, -rows % down))
    largest, padded = torch.finfo(NARROW).max, x.shape
    blocks = x.reshape(padded[0] // down, down, padded[1] // across, across)
    scales = (blocks.abs().amax(dim=3).amax(dim=1).float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks.float() / scales[:, None, :, None]).clamp(-largest, largest).to(NARROW)
    return Operand(values.reshape(padded).contiguous(), scales.contiguous(), rows)  # a transposed x has turned strides


class _FineProduct(torch.autograd.Function):
    @staticmethod
    @takes_context
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, scales: str, *cast: Tensor) -> Tensor:
        ctx.scales, ctx.dtype, ctx.given = scales, weight_NK.dtype, len(cast)
        ctx.save_for_backward(x_MK, *(cast[2:] or (weight_NK,)))
        of_tokens, of_weights = WAYS[scales]
        weight = Operand(cast[0], cast[1], len(weight_NK)) if cast else of_weights(weight_NK)
        return multiply(of_tokens(x_MK), weight, x_MK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, *kept = ctx.saved_tensors
        of_tokens, of_weights = WAYS[ctx.scales]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight = Operand(kept[0], kept[1], x_MK.shape[1]) if ctx.given else of_weights(kept[0].t())
            grad_x = multiply(of_tokens(grad_MN), weight, grad_MN.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = multiply(of_tokens(grad_MN.t()), of_tokens(x_MK.t()), ctx.dtype)
        return grad_x, grad_weight, None, *(None for _ in range(ctx.given))
