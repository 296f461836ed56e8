"""Attention in float64 in compiled blocks on the CPU, on torch before 2.13.

What the compiler knows of the CPU's kernel there is that its log-sum-exp is float32, which for float64 it is not: the
compiled backward would be refused its own forward's result. Only proofs compute in float64.
"""

import torch
from torch import Tensor

_library: torch.library.Library | None = None


def correct_attention_shapes() -> None:
    """Tell the compiler the true format of what attention returns, once."""
    global _library
    if _library is None and torch.__version__ < "2.13":  # a comparison of versions, not of text
        _library = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
        _library.impl(  # type: ignore[no-untyped-call]
            "_scaled_dot_product_flash_attention_for_cpu", _results, allow_override=True
        )


def _results(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty_like(query), query.new_empty(batch, queries, heads, dtype=wide).transpose(1, 2)
