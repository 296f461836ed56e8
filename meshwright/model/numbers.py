"""Number formats of sums."""

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and losses: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
