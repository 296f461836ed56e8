"""AdamW updates as Triton kernels, one for large tensors, one for all small ones together; imported only with a GPU and
Triton.

Launching a kernel takes the host 40 µs, in which an H200 updates five million parameters: tensors smaller than that are
updated together, by a kernel that looks up which tensor its block belongs to.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.parallel import addresses_of, blocks_of, is_aligned

BLOCK = 4096
LARGE = 2**23
"""Entries of a tensor whose update takes longer than launching another kernel."""
_FORMATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Tensors(NamedTuple):
    """What the update of one parameter reads and writes."""

    master: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    working: Tensor


class Numbers(NamedTuple):
    """`kept` is the fraction of a master left after decay; `rate` and `root2` include bias correction."""

    kept: float
    rate: float
    beta1: float
    beta2: float
    root2: float
    eps: float


@triton.jit
def _update(
    master_ptr, gradient_ptr, mean_ptr, square_ptr, working_ptr, inside, factor, kept, rate, beta1, beta2, root2, eps
):
    gradient = tl.load(gradient_ptr, mask=inside).to(tl.float32) * factor
    mean = tl.load(mean_ptr, mask=inside)
    square = tl.load(square_ptr, mask=inside)
    master = tl.load(master_ptr, mask=inside) * kept
    mean = mean + (gradient - mean) * (1.0 - beta1)
    square = square * beta2 + gradient * gradient * (1.0 - beta2)
    master = master - rate * mean / (tl.sqrt(square) / root2 + eps)
    tl.store(mean_ptr, mean, mask=inside)
    tl.store(square_ptr, square, mask=inside)
    tl.store(master_ptr, master, mask=inside)
    tl.store(working_ptr, master.to(working_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _adamw(
    master_ptr, gradient_ptr, mean_ptr, square_ptr, working_ptr, count, decision_ptr,
    kept, rate, beta1, beta2, root2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(decision_ptr + 1) == 0:
        return
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _update(
        master_ptr + place, gradient_ptr + place, mean_ptr + place, square_ptr + place, working_ptr + place,
        place < count, tl.load(decision_ptr), kept, rate, beta1, beta2, root2, eps,
    )  # fmt: skip


@triton.jit
def _adamw_of_many(
    addresses_ptr, owners_ptr, firsts_ptr, counts_ptr, tensors, decision_ptr,
    kept, rate, beta1, beta2, root2, eps,
    GRADIENT: tl.constexpr, WORKING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(decision_ptr + 1) == 0:
        return
    block = tl.program_id(0)
    owner = tl.load(owners_ptr + block)
    place = (block - tl.load(firsts_ptr + owner)) * BLOCK + tl.arange(0, BLOCK)
    # Loaded numbers are not known to be multiples of anything, without which entries are read one by one.
    inside = place < tl.multiple_of(tl.load(counts_ptr + owner), 16)
    addresses_ptr += owner
    master_ptr = tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))
    gradient_ptr = tl.load(addresses_ptr + tensors).to(tl.pointer_type(GRADIENT))
    mean_ptr = tl.load(addresses_ptr + 2 * tensors).to(tl.pointer_type(tl.float32))
    square_ptr = tl.load(addresses_ptr + 3 * tensors).to(tl.pointer_type(tl.float32))
    working_ptr = tl.load(addresses_ptr + 4 * tensors).to(tl.pointer_type(WORKING))
    _update(
        tl.multiple_of(master_ptr + place, 16), tl.multiple_of(gradient_ptr + place, 16),
        tl.multiple_of(mean_ptr + place, 16), tl.multiple_of(square_ptr + place, 16),
        tl.multiple_of(working_ptr + place, 16),
        inside, tl.load(decision_ptr), kept, rate, beta1, beta2, root2, eps,
    )  # fmt: skip


def joins_others(update: Tensors) -> bool:
    """Whether a tensor is small, and aligned so that the kernel for many can read several entries at a time."""
    return update.master.numel() < LARGE and all(is_aligned(tensor) for tensor in update)


def launch(update: Tensors, decision: Tensor, numbers: Numbers) -> None:
    """Update a master, its moments and its working copy. `decision`, on the device, has the factor of the gradient, and
    zero if nothing is to be changed."""
    count = update.master.numel()
    _adamw[(triton.cdiv(count, BLOCK),)](*update, count, decision, *numbers, BLOCK=BLOCK, num_warps=8)


class Together(NamedTuple):
    """Tensors of one pair of formats that one kernel updates, and where the device finds them."""

    updates: list[Tensors]
    """Kept, so that their memory is."""
    addresses: Tensor


def together(updates: Sequence[Tensors]) -> list[Together]:
    """Many tensors, each of which `joins_others`, for one kernel per pair of formats."""
    by_format: dict[tuple[torch.dtype, torch.dtype], list[Tensors]] = {}
    for update in updates:
        by_format.setdefault((update.gradient.dtype, update.working.dtype), []).append(update)
    return [
        Together(alike, addresses_of([tensor for column in zip(*alike, strict=True) for tensor in column]))
        for alike in by_format.values()
    ]


def launch_together(them: Together, decision: Tensor, numbers: Numbers) -> None:
    """Update what `together` put together."""
    first = them.updates[0]
    counts = tuple(update.master.numel() for update in them.updates)
    owners, firsts, sizes = blocks_of(counts, BLOCK, first.master.device)
    _adamw_of_many[(len(owners),)](
        them.addresses, owners, firsts, sizes, len(them.updates), decision, *numbers,
        GRADIENT=_FORMATS[first.gradient.dtype], WORKING=_FORMATS[first.working.dtype], BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
