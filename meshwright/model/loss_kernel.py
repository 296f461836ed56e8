"""Cross-entropy of a chunk of logits and its gradient as one Triton kernel; imported only with a GPU and Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16384
LEAST_TAIL = 1024
"""Columns that 16 warps read at a time, two by each thread."""


@triton.jit
def _add(highest, total, x):
    """Σ exp(x − highest) with some more x."""
    higher = tl.maximum(highest, tl.max(x, axis=0))
    return higher, total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), axis=0)


@triton.jit
def _cross_entropy(
    logits_ptr, labels_ptr, shares_ptr, losses_ptr, vocabulary, stride, ignore,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    highest, total = -float("inf"), 0.0
    # Whole blocks need no mask, which for odd sizes keeps the compiler from reading many entries at a time.
    whole = vocabulary // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(logits_ptr + start + tl.arange(0, BLOCK), eviction_policy="evict_last").to(tl.float32)
        highest, total = _add(highest, total, x)
    if whole < vocabulary:
        column = whole + tl.arange(0, TAIL)
        inside = column < vocabulary
        x = tl.load(logits_ptr + column, mask=inside, other=-float("inf"), eviction_policy="evict_last")
        highest, total = _add(highest, total, x.to(tl.float32))
    valid = label != ignore
    own = tl.load(logits_ptr + tl.where(valid, label, 0)).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(valid, tl.log(total) + highest - own, 0.0))
    if GRADIENT:
        share = tl.load(shares_ptr + row)
        factor = share / total
        for start in range(0, whole, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + column).to(tl.float32)
            gradient = tl.exp(x - highest) * factor - tl.where(column == label, share, 0.0)
            tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty))
        if whole < vocabulary:
            column = whole + tl.arange(0, TAIL)
            inside = column < vocabulary
            x = tl.load(logits_ptr + column, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(x - highest) * factor - tl.where(column == label, share, 0.0)
            tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def launch(
    logits_NV: Tensor, labels_N1: Tensor, shares_N1: Tensor, with_gradient: bool, ignore: int
) -> tuple[Tensor, Tensor | None]:
    """The cross-entropy of some tokens, and its gradient, which overwrites the logits."""
    rows, vocabulary = logits_NV.shape
    tail = max(LEAST_TAIL, triton.next_power_of_2(vocabulary % BLOCK))  # not a whole block for what is left of 50,257
    losses = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    _cross_entropy[(rows,)](
        logits_NV, labels_N1, shares_N1, losses, vocabulary, logits_NV.stride(0), ignore,
        GRADIENT=with_gradient, BLOCK=BLOCK, TAIL=tail, num_warps=16,
    )  # fmt: skip
    return losses, logits_NV if with_gradient else None
