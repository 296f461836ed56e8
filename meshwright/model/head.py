"""The head and its loss in one module, so that logits never exist whole. N tokens, D width, V vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job.model import Model
from meshwright.model.cost import Cost, own_parameters, saved, wide_dtype

IGNORE = -100
"""The label of a token that counts for nothing."""

CHUNK_LOGITS_BYTES = 256 * 2**20
"""Float32 logits that may exist at a time: large enough to keep a GPU's matmuls busy, small beside its memory."""


class Head(nn.Module):
    """The matrix from hidden states to the vocabulary, and the cross-entropy behind it."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.width))

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
        loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_BSD.flatten(0, -2), self.weight, labels_BS.flatten(), valid_count
        )
        return loss

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


def divisor(valid_count: Tensor | float) -> Tensor | float:
    """What losses are divided by: a step without a single valid token has loss 0, not 0 / 0."""
    if isinstance(valid_count, Tensor):
        return torch.where(valid_count > 0, valid_count, 1)
    return valid_count or 1


class _ChunkedLoss(torch.autograd.Function):
    """Cross-entropy by chunks of tokens, each giving its share of both gradients before the next begins."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, valid_count: Tensor | float
    ) -> Tensor:
        wide = wide_dtype(hidden_ND.dtype)
        count = divisor(valid_count)
        with_gradients = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if with_gradients else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if with_gradients else None

        rows = max(1, CHUNK_LOGITS_BYTES // (4 * weight_VD.shape[0]))
        for start in range(0, hidden_ND.shape[0], rows):
            hidden = hidden_ND[start : start + rows]
            labels = labels_N[start : start + rows].unsqueeze(1)
            valid = labels != IGNORE
            target = torch.where(valid, labels, 0)
            logits = (hidden @ weight_VD.t()).to(wide)
            log_total = torch.logsumexp(logits, dim=1, keepdim=True)
            loss += torch.where(valid, log_total - logits.gather(1, target), 0.0).sum()
            if grad_hidden_ND is not None and grad_weight_VD is not None:
                share = valid.to(wide) / count
                grad = logits.sub_(log_total).exp_().mul_(share).scatter_add_(1, target, -share).to(hidden.dtype)
                grad_hidden_ND[start : start + rows] = grad @ weight_VD
                add_product(grad_weight_VD, grad.t(), hidden)

        if grad_hidden_ND is not None and grad_weight_VD is not None:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return (
            grads[0].to(grad_hidden_ND.dtype) * grad_hidden_ND,
            grads[0].to(grad_weight_VD.dtype) * grad_weight_VD,
            None,
            None,
        )


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, kept wide where the device can multiply narrow numbers into wide ones."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total += left @ right
