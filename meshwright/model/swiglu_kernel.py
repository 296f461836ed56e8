"""The gradient of silu(gate) × up as one Triton kernel; imported only with a GPU and Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _swiglu_backward(grad_ptr, gate_up_ptr, out_ptr, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):
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


def launch(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate and up side by side, from the gradient of the product; both contiguous."""
    width = grad.shape[-1]
    out = torch.empty_like(gate_up)
    grid = (grad.numel() // width, triton.cdiv(width, BLOCK))
    wide = tl.float64 if grad.dtype == torch.float64 else tl.float32
    _swiglu_backward[grid](grad, gate_up, out, width, WIDE=wide, BLOCK=BLOCK, num_warps=8)
    return out
