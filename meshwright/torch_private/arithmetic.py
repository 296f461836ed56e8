"""Operations on many tensors at once, fp8 products, and what a CPU can multiply. torch 2.11 to 2.15."""

import torch

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
scaled_mm = torch._scaled_mm


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU supports a 16-bit format natively; elsewhere it is emulated, many times slower."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
