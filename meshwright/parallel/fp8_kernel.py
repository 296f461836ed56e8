"""Triton kernels of fp8: a matrix as it is and transposed, and widened again; imported only with a GPU and Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128


@triton.jit
def _cast_both(x_ptr, scale_ptr, out_ptr, turned_ptr, rows, columns, largest, TILE: tl.constexpr, PLAIN: tl.constexpr):
    down = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    across = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (down[:, None] < rows) & (across[None, :] < columns)
    x = tl.load(x_ptr + down[:, None] * columns + across[None, :], mask=inside, other=0.0).to(tl.float32)
    x = x / tl.load(scale_ptr)
    x = tl.minimum(tl.maximum(x, -largest), largest)
    narrow = x.to(turned_ptr.dtype.element_ty)
    if PLAIN:
        tl.store(out_ptr + down[:, None] * columns + across[None, :], narrow, mask=inside)
    turned = across.to(tl.int64)[:, None] * rows + down[None, :]
    tl.store(turned_ptr + turned, tl.trans(narrow), mask=tl.trans(inside))


def launch(x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool) -> tuple[Tensor, Tensor]:
    """(x / scale, its transpose) in fp8, of a contiguous x; only the transpose unless `plain`."""
    rows, columns = x.shape
    turned = torch.empty(columns, rows, dtype=dtype, device=x.device)
    out = torch.empty(rows, columns, dtype=dtype, device=x.device) if plain else turned.new_empty(0)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    largest = torch.finfo(dtype).max
    _cast_both[grid](x, scale, out, turned, rows, columns, largest, TILE=TILE, PLAIN=plain, num_warps=8)
    return out, turned


@triton.jit
def _widen(narrow_ptr, scale_ptr, out_ptr, count, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    x = tl.load(narrow_ptr + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=inside)


def launch_widen(narrow: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write narrow × scale to `out`, as long and contiguous too."""
    count = narrow.numel()
    _widen[(triton.cdiv(count, 4096),)](narrow, scale, out, count, TILE=4096, num_warps=8)
