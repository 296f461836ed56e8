"""Attention in float64 in compiled blocks on the CPU, on torch before 2.13.

What the compiler knows of the CPU's kernel there is that its log-sum-exp is float32, which for float64 it is not: the
compiled backward would be refused its own forward's result. Only proofs compute in float64.
"""

import torch
from torch import Tensor

from meshwright.torch_private.attention import cpu_flash
from meshwright.torch_private.compiler import set_shapes


def correct_attention_shapes() -> None:
    """Tell the compiler the true format of what attention returns."""
    if torch.__version__ < "2.13":  # a comparison of versions, not of text
        set_shapes(cpu_flash.default, _results)


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
