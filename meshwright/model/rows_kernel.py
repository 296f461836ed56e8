"""Rows of tokens for experts as Triton kernels, each one pass over memory; imported only with a GPU and Triton.

order_R gives for each row, sorted by expert, its slot: token × top_k + place among the token's experts; place_TK is its
inverse. Every sum has a fixed order, so that results never depend on timing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 2048
"""Columns that a program handles at a time."""
PER_THREAD = 8
"""Columns per thread: 16 bytes of 16-bit numbers, the widest read."""


@triton.jit
def _gather_rows(x_ptr, order_ptr, out_ptr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    token = tl.load(order_ptr + row) // TOP_K
    x = tl.load(x_ptr + token * WIDTH + columns, mask=inside)
    tl.store(out_ptr + row * WIDTH + columns, x, mask=inside)


@triton.jit
def _sum_rows(
    rows_ptr, place_ptr, weights_ptr, out_ptr,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros((BLOCK,), WIDE)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        row = tl.load(place_ptr + slot)
        value = tl.load(rows_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(WIDE)
        if WEIGHTED:
            value = value * tl.load(weights_ptr + slot).to(WIDE)
        total += value
    tl.store(out_ptr + token * WIDTH + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_rows_backward(
    grad_ptr, rows_ptr, order_ptr, weights_ptr, grad_rows_ptr, grad_weights_ptr,
    TOP_K: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row)
    token = slot // TOP_K
    weight = tl.load(weights_ptr + slot).to(WIDE)
    along = tl.zeros((BLOCK,), WIDE)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        grad = tl.load(grad_ptr + token * WIDTH + columns, mask=inside, other=0.0).to(WIDE)
        value = tl.load(rows_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(WIDE)
        weighted = (grad * weight).to(grad_rows_ptr.dtype.element_ty)
        tl.store(grad_rows_ptr + row * WIDTH + columns, weighted, mask=inside)
        along += grad * value
    tl.store(grad_weights_ptr + slot, tl.sum(along, axis=0).to(grad_weights_ptr.dtype.element_ty))


@triton.jit
def _weighted_swiglu(
    gate_up_ptr, order_ptr, weights_ptr, out_ptr, WIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weight = tl.load(weights_ptr + tl.load(order_ptr + row)).to(WIDE)
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(WIDE)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(WIDE)
    inner = gate * tl.sigmoid(gate) * up * weight
    tl.store(out_ptr + row * WIDTH + columns, inner.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_swiglu_backward(
    grad_ptr, gate_up_ptr, order_ptr, weights_ptr, grad_gate_up_ptr, grad_weights_ptr,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + slot).to(WIDE)
    kind = grad_gate_up_ptr.dtype.element_ty
    along = tl.zeros((BLOCK,), WIDE)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        grad = tl.load(grad_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(WIDE)
        gate = tl.load(gate_up_ptr + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(WIDE)
        up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(WIDE)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        along += grad * silu * up
        grad = grad * weight
        grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(grad_gate_up_ptr + row * 2 * WIDTH + columns, grad_gate.to(kind), mask=inside)
        tl.store(grad_gate_up_ptr + row * 2 * WIDTH + WIDTH + columns, (grad * silu).to(kind), mask=inside)
    tl.store(grad_weights_ptr + slot, tl.sum(along, axis=0).to(grad_weights_ptr.dtype.element_ty))


def _block(width: int) -> dict[str, Any]:
    block = min(triton.next_power_of_2(width), MOST)
    return {"WIDTH": width, "BLOCK": block, "num_warps": max(1, block // (32 * PER_THREAD))}


def _wide(tensor: Tensor) -> Any:
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


def gather(x_TD: Tensor, order_R: Tensor, top_k: int) -> Tensor:
    """Every token once for each of its experts, sorted by expert."""
    rows, width, block = len(order_R), x_TD.shape[1], _block(x_TD.shape[1])
    out_RD = x_TD.new_empty(rows, width)
    _gather_rows[(rows, triton.cdiv(width, block["BLOCK"]))](x_TD, order_R, out_RD, TOP_K=top_k, **block)
    return out_RD


def total(rows_RD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """The sum of each token's rows, weighted if there are weights."""
    (tokens, top_k), width, block = place_TK.shape, rows_RD.shape[1], _block(rows_RD.shape[1])
    out_TD = rows_RD.new_empty(tokens, width)
    weights = rows_RD if weights_TK is None else weights_TK
    _sum_rows[(tokens, triton.cdiv(width, block["BLOCK"]))](
        rows_RD, place_TK, weights, out_TD,
        TOP_K=top_k, WEIGHTED=weights_TK is not None, WIDE=_wide(rows_RD), **block,
    )  # fmt: skip
    return out_TD


def total_backward(grad_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, order_R: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the weights of a weighted `total`."""
    grad_rows_RD, grad_weights_TK = torch.empty_like(rows_RD), torch.empty_like(weights_TK)
    _sum_rows_backward[(len(order_R),)](
        grad_TD, rows_RD, order_R, weights_TK, grad_rows_RD, grad_weights_TK,
        TOP_K=weights_TK.shape[1], WIDE=_wide(rows_RD), **_block(rows_RD.shape[1]),
    )  # fmt: skip
    return grad_rows_RD, grad_weights_TK


def swiglu(gate_up: Tensor, weights_TK: Tensor, order_R: Tensor) -> Tensor:
    """silu(gate) × up × the row's weight."""
    rows, width = len(order_R), gate_up.shape[1] // 2
    block = _block(width)
    out_RF = gate_up.new_empty(rows, width)
    _weighted_swiglu[(rows, triton.cdiv(width, block["BLOCK"]))](
        gate_up, order_R, weights_TK, out_RF, WIDE=_wide(gate_up), **block
    )
    return out_RF


def swiglu_backward(grad_RF: Tensor, gate_up: Tensor, weights_TK: Tensor, order_R: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up side by side, and of the weights."""
    grad_gate_up, grad_weights_TK = torch.empty_like(gate_up), torch.empty_like(weights_TK)
    _weighted_swiglu_backward[(len(order_R),)](
        grad_RF, gate_up, order_R, weights_TK, grad_gate_up, grad_weights_TK,
        WIDE=_wide(gate_up), **_block(grad_RF.shape[1]),
    )  # fmt: skip
    return grad_gate_up, grad_weights_TK
