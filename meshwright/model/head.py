"""The head and its loss in one module, so that logits never exist whole. N tokens, D width, V vocabulary."""

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.hardware.triton import HAS_TRITON
from meshwright.job.model import Model
from meshwright.model.cost import Cost, own_parameters, saved, wide_dtype

IGNORE = -100
"""The label of a token that counts for nothing."""

CHUNK_LOGITS_BYTES = 2**30
"""Logits that may exist at a time: every chunk adds to the whole weight gradient once, which for few tokens costs more
than their products."""
CHUNK_MULTIPLE = 128
"""Rows of a matrix product's tile."""
ROW_MULTIPLE = 64
"""Logits between the beginnings of rows: lines of 128 bytes in 16 bits."""

LossOfLogits = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""(logits_NV, labels_N1, shares_N1, with_gradient) to Σ cross-entropy, and the gradient of Σ share × cross-entropy."""


class Head(nn.Module):
    """The matrix from hidden states to the vocabulary, and the cross-entropy behind it."""

    loss_of_logits: LossOfLogits

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.width))
        self.loss_of_logits = loss_of_logits

    def forward(
        self, hidden_BSD: Tensor, labels_BS: Tensor | None = None, valid_count: Tensor | float | None = None
    ) -> Tensor:
        """Logits without labels; with them Σ cross-entropy over labels other than IGNORE / valid_count.

        valid_count is the number of valid tokens of the whole step, so the losses of its micro-batches simply add.
        """
        if labels_BS is None:
            return self.logits(hidden_BSD)
        if valid_count is None:
            raise ValueError("labels need valid_count, the number of valid tokens in the whole step")
        return chunked_loss(hidden_BSD, self.weight, labels_BS, valid_count, self.loss_of_logits)

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """Scores of every word of the vocabulary, whole."""
        return F.linear(hidden_BSD, self.weight)

    def cost(self, batch: int, sequence: int, dtype: torch.dtype) -> Cost:
        """Cost of training with labels: gradients are made in the forward pass and are all that is saved."""
        vocabulary, width = self.weight.shape
        tokens = batch * sequence
        product = 2 * tokens * vocabulary * width
        kept = saved(hidden_gradient=(tokens * width, dtype), weight_gradient=(vocabulary * width, dtype))
        return Cost(own_parameters(self), 3 * product, 0) + kept


def chunked_loss(
    hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, valid_count: Tensor | float, loss: LossOfLogits
) -> Tensor:
    """Σ cross-entropy / valid_count from hidden states, a chunk of tokens at a time."""
    result: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_BSD.flatten(0, -2), weight_VD, labels_BS.flatten(), valid_count, loss
    )
    return result


def loss_of_logits(
    logits_NV: Tensor, labels_N1: Tensor, shares_N1: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Σ cross-entropy of some tokens and its gradient by the logits, in whose memory it may be made."""
    if logits_NV.is_cuda and HAS_TRITON and wide_dtype(logits_NV.dtype) == torch.float32:
        # By hand, since the compiler's kernel writes the gradient beside the logits: twice the memory, and of what it
        # reads a second time less is still in the cache.
        from meshwright.model.loss_kernel import launch

        return launch(logits_NV, labels_N1, shares_N1, with_gradient, IGNORE)
    wide_NV = logits_NV.to(wide_dtype(logits_NV.dtype))
    valid_N1 = labels_N1 != IGNORE
    target_N1 = torch.where(valid_N1, labels_N1, 0)
    highest_N1 = wide_NV.amax(dim=1, keepdim=True)
    own_N1 = wide_NV.gather(1, target_N1) - highest_N1
    powers_NV = wide_NV.sub_(highest_N1).exp_()
    total_N1 = powers_NV.sum(dim=1, keepdim=True)
    loss = torch.where(valid_N1, total_N1.log() - own_N1, 0.0).sum()
    if not with_gradient:
        return loss, None
    grad_NV = powers_NV.mul_(shares_N1 / total_N1).to(logits_NV.dtype)
    at_target_N1 = (own_N1.exp() / total_N1 - 1) * shares_N1
    return loss, grad_NV.scatter_(1, target_N1, at_target_N1.to(grad_NV.dtype))


class _ChunkedLoss(torch.autograd.Function):
    """Cross-entropy by chunks of tokens, each giving its share of both gradients before the next begins."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        valid_count: Tensor | float,
        loss_of_logits: LossOfLogits,
    ) -> Tensor:
        wide = wide_dtype(hidden_ND.dtype)
        with_gradients = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if with_gradients else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if with_gradients else None
        # A step without a single valid token has loss 0, not 0 / 0.
        count = torch.where(valid_count > 0, valid_count, 1) if isinstance(valid_count, Tensor) else valid_count or 1
        shares_N1 = ((labels_N != IGNORE).to(wide) / count).unsqueeze(1)

        rows = chunk_rows(hidden_ND.shape[0], weight_VD)
        for start in range(0, hidden_ND.shape[0], rows):
            chunk = slice(start, start + rows)
            hidden = hidden_ND[chunk]
            logits = _product(hidden, weight_VD)
            part, grad = loss_of_logits(logits, labels_N[chunk].unsqueeze(1), shares_N1[chunk], with_gradients)
            loss += part
            if grad is not None and grad_hidden_ND is not None and grad_weight_VD is not None:
                torch.mm(grad, weight_VD, out=grad_hidden_ND[chunk])
                add_product(grad_weight_VD, grad.t(), hidden)
            del logits, grad  # the next chunk's take their memory

        if grad_hidden_ND is not None and grad_weight_VD is not None:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return (
            grads[0].to(grad_hidden_ND.dtype) * grad_hidden_ND,
            grads[0].to(grad_weight_VD.dtype) * grad_weight_VD,
            None,
            None,
            None,
        )


def _product(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits; on a GPU in rows that begin where products read and write fast, whatever the vocabulary's size.

    With GPT-2's 50,257 words in rows of just their length all three products take four times as long on an H200.
    """
    vocabulary = weight_VD.shape[0]
    if not hidden_ND.is_cuda or vocabulary % ROW_MULTIPLE == 0:
        return hidden_ND @ weight_VD.t()
    rows_NV = hidden_ND.new_empty(hidden_ND.shape[0], ceil(vocabulary / ROW_MULTIPLE) * ROW_MULTIPLE)
    return torch.mm(hidden_ND, weight_VD.t(), out=rows_NV[:, :vocabulary])


def chunk_rows(tokens: int, weight_VD: Tensor) -> int:
    """Tokens of a chunk: as many as fit in CHUNK_LOGITS_BYTES, the last chunk about as large as the others."""
    most = max(1, CHUNK_LOGITS_BYTES // (weight_VD.shape[0] * weight_VD.element_size()))
    even = ceil(tokens / ceil(tokens / most))
    return even if even < CHUNK_MULTIPLE else ceil(even / CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, kept wide where the device can multiply narrow numbers into wide ones."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
