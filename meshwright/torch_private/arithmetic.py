"""Operations on many tensors at once, fp8 products, a GPU made to wait, and what a CPU can multiply. torch 2.11 to
2.15."""

import torch
import torch.nn.functional as F
from torch import Tensor

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
scaled_mm = torch._scaled_mm


def sleep_on_gpu(cycles: int) -> None:
    """Launch a kernel that does nothing for some cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def blockwise_mm(left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """left × rightᵀ in fp8 with a scale per 1 × 128 numbers of the left and per 1 × 128 or 128 × 128 of the right.

    cuBLAS reads scales of lines by columns, and those of squares by rows that are filled up to a multiple of 4.
    """
    squares, line = right_scales.shape[0] < right.shape[0], F.ScalingType.BlockWise1x128
    return F.scaled_mm(
        left,
        right.t(),
        left_scales.t().contiguous().t(),
        line,
        F.pad(right_scales, (0, -right_scales.shape[1] % 4)).t() if squares else right_scales.t().contiguous().t(),
        F.ScalingType.BlockWise128x128 if squares else line,
        swizzle_a=F.SwizzleType.NO_SWIZZLE,
        swizzle_b=F.SwizzleType.NO_SWIZZLE,
        output_dtype=dtype,
    )


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU supports a 16-bit format natively; elsewhere it is emulated, many times slower."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
