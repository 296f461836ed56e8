"""Attention sinks: a learned logit per head that takes part in every query's softmax and has no value.

With the log-sum-exp of a query's scores, the result is that of plain attention × sigmoid(lse − sink), and its gradients
are plain attention's from this result and the log-sum-exp that counts the sink: kernels need not know of it.
B batch, S queries, T keys, H heads, K kv heads, E head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.numbers import wide_dtype
from meshwright.torch_private.attention import cpu_flash, cpu_flash_backward, varlen_flash, varlen_flash_backward


class Sinks(nn.Module):
    """The logits of a layer's heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))
        self.own: Callable[[Tensor], Tensor] = lambda weight: weight
        """The logits of this rank's heads."""

    def forward(self) -> Tensor:
        return self.own(self.weight)


def on_cpu(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, sinks_H: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with sinks on a CPU; causal without a mask, which is added to the scores."""
    out: Tensor = _OnCpu.apply(q_BSHE, k_BTKE, v_BTKE, sinks_H, mask)  # type: ignore[no-untyped-call]
    return out


def packed(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, sinks_H: Tensor, boundaries: Tensor, window: int | None
) -> Tensor:
    """Causal attention with sinks on CUDA in 16 bits, within boundaries of the flattened batch."""
    out: Tensor = _Packed.apply(q_BSHE, k_BSKE, v_BSKE, sinks_H, boundaries, window)  # type: ignore[no-untyped-call]
    return out


def by_formula(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, sinks_H: Tensor, visible: Tensor | None) -> Tensor:
    """The softmax over scores and sink, written out, for what kernels do not take."""
    wide, groups = wide_dtype(q_BSHE.dtype), q_BSHE.shape[2] // k_BTKE.shape[2]
    q_BHSE, k_BHTE, v_BHTE = (
        q_BSHE.transpose(1, 2).to(wide),
        k_BTKE.transpose(1, 2).repeat_interleave(groups, dim=1).to(wide),
        v_BTKE.transpose(1, 2).repeat_interleave(groups, dim=1).to(wide),
    )
    scores_BHST = q_BHSE @ k_BHTE.transpose(-1, -2) * q_BSHE.shape[-1] ** -0.5
    if visible is None:
        visible = torch.ones(scores_BHST.shape[-2:], dtype=torch.bool, device=q_BSHE.device).tril()
    scores_BHST = scores_BHST.masked_fill(~visible, float("-inf"))
    sinks_BHS1 = sinks_H.to(wide).view(1, -1, 1, 1).expand(*scores_BHST.shape[:-1], 1)
    weights_BHST = torch.cat((scores_BHST, sinks_BHS1), -1).softmax(-1)[..., :-1]
    return (weights_BHST @ v_BHTE).transpose(1, 2).to(q_BSHE.dtype)


def counted(out_BSHE: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp of plain attention, with the sinks counted."""
    with_sink_BHS = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype)[None, :, None])
    kept_BSH1 = (lse_BHS - with_sink_BHS).exp().transpose(1, 2).unsqueeze(-1)
    return (out_BSHE * kept_BSH1).to(out_BSHE.dtype), with_sink_BHS


def gradient_of_sinks(grad_BSHE: Tensor, out_BSHE: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """A sink's share of each softmax, times what all the shares lose if it grows."""
    wide = lse_BHS.dtype
    along_out_BHS = (grad_BSHE.to(wide) * out_BSHE.to(wide)).sum(-1).transpose(1, 2)
    share_BHS = (sinks_H.to(wide)[None, :, None] - lse_BHS).exp()
    return -(share_BHS * along_out_BHS).sum((0, 2)).to(sinks_H.dtype)


class _OnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, sinks_H: Tensor, mask: Tensor | None) -> Any:
        q, k, v = (each.transpose(1, 2) for each in (q_BSHE, k_BTKE, v_BTKE))
        out_BHSE, lse_BHS = cpu_flash(q, k, v, 0.0, mask is None, attn_mask=mask)
        out_BSHE, lse_BHS = counted(out_BHSE.transpose(1, 2), lse_BHS, sinks_H)
        ctx.save_for_backward(q_BSHE, k_BTKE, v_BTKE, sinks_H, mask, out_BSHE, lse_BHS)
        return out_BSHE

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q_BSHE, k_BTKE, v_BTKE, sinks_H, mask, out_BSHE, lse_BHS = ctx.saved_tensors
        grad_BSHE, *inputs = (each.transpose(1, 2) for each in (grads[0], q_BSHE, k_BTKE, v_BTKE, out_BSHE))
        found = cpu_flash_backward(grad_BSHE, *inputs, lse_BHS, 0.0, mask is None, attn_mask=mask)
        grad_q, grad_k, grad_v = (each.transpose(1, 2) for each in found)
        return grad_q, grad_k, grad_v, gradient_of_sinks(grads[0], out_BSHE, lse_BHS, sinks_H), None


class _Packed(torch.autograd.Function):
    """CUDA, 16-bit: rows and documents packed into one sequence with boundaries."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        sinks_H: Tensor,
        boundaries: Tensor,
        window: int | None,
    ) -> Any:
        batch, sequence, heads, _ = q_BSHE.shape
        ctx.options = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        packed = (each.flatten(0, 1) for each in (q_BSHE, k_BSKE, v_BSKE))
        out, lse, *_ = varlen_flash(
            *packed, boundaries, boundaries, sequence, sequence, 0.0, window is None, False, **ctx.options
        )
        out_BSHE, lse_BHS = out.view(q_BSHE.shape), lse.view(heads, batch, sequence).transpose(0, 1)
        out_BSHE, lse_BHS = counted(out_BSHE, lse_BHS, sinks_H)
        ctx.save_for_backward(q_BSHE, k_BSKE, v_BSKE, sinks_H, boundaries, out_BSHE, lse_BHS)
        return out_BSHE

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q_BSHE, k_BSKE, v_BSKE, sinks_H, boundaries, out_BSHE, lse_BHS = ctx.saved_tensors
        sequence = q_BSHE.shape[1]
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BSHE.device), torch.empty(0, device=q_BSHE.device)
        packed = (each.contiguous().flatten(0, 1) for each in (grads[0], q_BSHE, k_BSKE, v_BSKE, out_BSHE))
        found = varlen_flash_backward(
            *packed, lse_BHS.transpose(0, 1).flatten(1, 2).contiguous(), boundaries, boundaries, sequence, sequence,
            0.0, not ctx.options, *no_dropout, **ctx.options,
        )  # fmt: skip
        grad_q, grad_k, grad_v = (g.view(x.shape) for g, x in zip(found, (q_BSHE, k_BSKE, v_BSKE), strict=True))
        return grad_q, grad_k, grad_v, gradient_of_sinks(grads[0], out_BSHE, lse_BHS, sinks_H), None, None
