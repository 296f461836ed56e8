"""Number formats as torch dtypes: of what is kept in memory, and of sums; and the label that is ignored."""

import torch

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Formats of what is kept in memory: tf32 and fp8 are formats of matrix products only."""
IGNORE = -100
"""The label of a token that is ignored."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, losses and sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
