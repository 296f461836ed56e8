"""The gradient of silu(gate) × up as one Triton kernel; imported only with a GPU and Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _swiglu_backward(
    grad_ptr, gate_up_ptr, out_ptr, product_ptr, width,
    PRODUCT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    grad = tl.load(grad_ptr + row * width + columns, mask=inside).to(WIDE)
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside).to(WIDE)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside).to(WIDE)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    grad_up = grad * silu
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * 2 * width + columns, grad_gate.to(kind), mask=inside)
    tl.store(out_ptr + row * 2 * width + width + columns, grad_up.to(kind), mask=inside)
    if PRODUCT:
        tl.store(product_ptr + row * width + columns, (silu * up).to(kind), mask=inside)


def launch(grad: Tensor, gate_up: Tensor, with_product: bool) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up side by side, from the gradient of the product, and, if asked for, the product; all
    contiguous."""
    width = grad.shape[-1]
    out, product = torch.empty_like(gate_up), torch.empty_like(grad) if with_product else grad.new_empty(0)
    grid = (grad.numel() // width, triton.cdiv(width, BLOCK))
    wide = tl.float64 if grad.dtype == torch.float64 else tl.float32
    _swiglu_backward[grid](
        grad, gate_up, out, product, width, PRODUCT=with_product, WIDE=wide, BLOCK=BLOCK, num_warps=8
    )
    return out, product
