"""One AdamW update of one tensor as one Triton kernel; imported only where a GPU and Triton are."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _adamw(
    master_ptr, gradient_ptr, mean_ptr, square_ptr, working_ptr, count,
    factor, kept, rate, beta1, beta2, root2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    gradient = tl.load(gradient_ptr + place, mask=inside).to(tl.float32) * factor
    mean = tl.load(mean_ptr + place, mask=inside)
    square = tl.load(square_ptr + place, mask=inside)
    master = tl.load(master_ptr + place, mask=inside) * kept
    mean = mean + (gradient - mean) * (1.0 - beta1)
    square = square * beta2 + gradient * gradient * (1.0 - beta2)
    master = master - rate * mean / (tl.sqrt(square) / root2 + eps)
    tl.store(mean_ptr + place, mean, mask=inside)
    tl.store(square_ptr + place, square, mask=inside)
    tl.store(master_ptr + place, master, mask=inside)
    tl.store(working_ptr + place, master.to(working_ptr.dtype.element_ty), mask=inside)


def launch(
    master: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    working: Tensor,
    *,
    factor: float,
    kept: float,
    rate: float,
    betas: tuple[float, float],
    root2: float,
    eps: float,
) -> None:
    """Update a master, its moments and its working copy; `kept` is what decay leaves, `rate` and `root2` are with the
    corrections of the first steps."""
    count = master.numel()
    _adamw[(triton.cdiv(count, BLOCK),)](
        master, gradient, mean, square, working, count, factor, kept, rate, *betas, root2, eps, BLOCK=BLOCK, num_warps=8
    )
