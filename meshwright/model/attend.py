"""Attention proper, as one replaceable callable. B batch, S queries, T keys, H heads, K kv heads, E head_dim."""

import inspect
from functools import cache
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model import sinks
from meshwright.model.documents import Documents
from meshwright.torch_private.attention import cpu_flash

EXPAND_GROUPS = False
"""On CUDA: whether kernels get a key-value head for every query head, where that was measured to be faster."""


class Attend(Protocol):
    """Any attention function: queries are the last S of the keys' T positions, and no query sees a later key.

    Models with sinks give that of every head. The second result is the log-sum-exp of every query's scores, or None
    where the kernel does not return it.
    """

    def __call__(
        self,
        q_BSHE: Tensor,
        k_BTKE: Tensor,
        v_BTKE: Tensor,
        positions: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Tensor | None]: ...


class CausalAttend:
    """Causal attention on one device, within documents where ids are given and within `window` tokens where set.

    The CPU kernel gives the log-sum-exp; on CUDA and with sinks it is None.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window

    def __call__(
        self,
        q_BSHE: Tensor,
        k_BTKE: Tensor,
        v_BTKE: Tensor,
        positions: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if sinks_H is not None:
            return self._with_sinks(q_BSHE, k_BTKE, v_BTKE, documents, sinks_H), None
        if q_BSHE.is_cuda:
            return self._on_cuda(q_BSHE, k_BTKE, v_BTKE, documents), None
        visible = self.visible(q_BSHE, k_BTKE, documents)
        mask = None if visible is None else additive_mask(visible, q_BSHE.dtype)
        out_BHSE, lse_BHS = cpu_flash(
            q_BSHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2), 0.0, mask is None, attn_mask=mask
        )
        return out_BHSE.transpose(1, 2), lse_BHS

    def _with_sinks(
        self, q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, documents: Documents | None, sinks_H: Tensor
    ) -> Tensor:
        whole = q_BSHE.shape[1] == k_BTKE.shape[1]
        if q_BSHE.is_cuda and whole and q_BSHE.dtype in (torch.float16, torch.bfloat16):
            boundaries = packed_boundaries(q_BSHE, documents)
            return sinks.packed(q_BSHE, k_BTKE, v_BTKE, sinks_H, boundaries, self.window)
        visible = self.visible(q_BSHE, k_BTKE, documents)
        if q_BSHE.is_cuda:
            return sinks.by_formula(q_BSHE, k_BTKE, v_BTKE, sinks_H, visible)
        mask = None if visible is None else additive_mask(visible, q_BSHE.dtype)
        return sinks.on_cpu(q_BSHE, k_BTKE, v_BTKE, sinks_H, mask)

    def needs_mask(self, queries: int, keys: int) -> bool:
        """Whether the window or a cache needs a mask other than the plain causal triangle."""
        return queries != keys or (self.window is not None and self.window < keys)

    def visible(self, q_BSHE: Tensor, k_BTKE: Tensor, documents: Documents | None) -> Tensor | None:
        """Which keys each query sees, (1 or B, 1, S, T) booleans; None for the plain causal triangle."""
        queries, keys = q_BSHE.shape[1], k_BTKE.shape[1]
        if documents is None and not self.needs_mask(queries, keys):
            return None
        column = torch.arange(keys, device=q_BSHE.device)
        row = column[keys - queries :, None]
        visible = (column <= row)[None, None]
        if self.window is not None:
            visible = visible & (column > row - self.window)
        if documents is not None:
            visible = visible & (documents.ids_BS[:, None, :, None] == documents.ids_BS[:, None, None, :])
        return visible

    def _on_cuda(self, q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, documents: Documents | None) -> Tensor:
        whole = q_BSHE.shape[1] == k_BTKE.shape[1]
        plain = documents is None and not self.needs_mask(q_BSHE.shape[1], k_BTKE.shape[1])
        if whole and not plain and q_BSHE.dtype in (torch.float16, torch.bfloat16):
            return self._varlen(q_BSHE, k_BTKE, v_BTKE, documents)
        heads = q_BSHE.shape[2]
        k_BKTE, v_BKTE = k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
        # In 32 bits torch has no kernel of groups, and would write out all scores instead.
        if (EXPAND_GROUPS and plain) or q_BSHE.dtype not in (torch.float16, torch.bfloat16):
            k_BKTE, v_BKTE = expanded(k_BKTE, v_BKTE, heads)
        out_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BKTE,
            v_BKTE,
            attn_mask=self.visible(q_BSHE, k_BTKE, documents),
            is_causal=plain,
            enable_gqa=heads != k_BKTE.shape[1],
        )
        return out_BHSE.transpose(1, 2)

    def _varlen(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents: Documents | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        batch, sequence, heads, _ = q_BSHE.shape
        boundaries = packed_boundaries(q_BSHE, documents)
        options: dict[str, Any] = {"window_size": (-1 if self.window is None else self.window - 1, 0)}
        groups = heads // k_BSKE.shape[2]
        if groups > 1 and _varlen_knows_groups():
            options["enable_gqa"] = True
        elif groups > 1:
            k_BSKE, v_BSKE = (t.repeat_interleave(groups, dim=2) for t in (k_BSKE, v_BSKE))
        q, k, v = q_BSHE.flatten(0, 1), k_BSKE.flatten(0, 1), v_BSKE.flatten(0, 1)
        out = cast(Tensor, varlen_attn(q, k, v, boundaries, boundaries, sequence, sequence, **options))
        return out.view(batch, sequence, heads, -1)


def packed_boundaries(q_BSHE: Tensor, documents: Documents | None) -> Tensor:
    """Where rows or documents begin in the flattened batch, for kernels that take packed sequences."""
    if documents is None:
        batch, sequence = q_BSHE.shape[:2]
        return torch.arange(0, (batch + 1) * sequence, sequence, dtype=torch.int32, device=q_BSHE.device)
    if documents.boundaries is not None:
        return documents.boundaries
    return cast(Tensor, documents.bounded().boundaries)


def expanded(k_BKTE: Tensor, v_BKTE: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Key-value heads repeated so that every query head has its own."""
    groups = heads // k_BKTE.shape[1]
    return k_BKTE.repeat_interleave(groups, dim=1), v_BKTE.repeat_interleave(groups, dim=1)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen and -inf where it is not."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


@cache
def _varlen_knows_groups() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
