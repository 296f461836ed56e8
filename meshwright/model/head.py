"""The head and its loss in one module, so that the logits never exist as a whole.

N tokens, D width, V vocabulary, W the vocabulary in whole lines of memory.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.cost import chunk_rows, in_whole_lines
from meshwright.hardware.torch_versions import HAS_TRITON
from meshwright.job import Model
from meshwright.model.numbers import IGNORE, wide_dtype
from meshwright.model.own_loss import own_loss_of_logits
from meshwright.model.preference import Pairs
from meshwright.registries import LOSSES
from meshwright.torch_private.arithmetic import foreach_mul

LossOfLogits = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""(logits_NV, labels_N1, shares_N1, with_gradient) to every token's cross-entropy, zero without a label, and the
gradient of Σ share × cross-entropy."""


class Head(nn.Module):
    """The matrix from hidden states to the vocabulary, and the loss after it: cross-entropy, or model.loss."""

    loss_of_logits: LossOfLogits
    products: "type[Products]"

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.width))
        self.loss_of_logits = loss_of_logits if shape.loss in LOSSES.built_in else own_loss_of_logits(shape.loss)
        self.products = Products

    def forward(
        self,
        hidden_BSD: Tensor,
        labels_BS: Tensor | None = None,
        valid_count: Tensor | float | None = None,
        pairs: Pairs | None = None,
    ) -> Tensor:
        """Logits without labels; with them Σ cross-entropy over labels other than IGNORE / valid_count.

        valid_count is the number of valid tokens of the whole step, so the losses of its micro-batches simply add. With
        pairs it is their number, and the loss is that of `preference_loss`.
        """
        if labels_BS is None:
            return self.logits(hidden_BSD)
        if valid_count is None:
            raise ValueError("labels need valid_count, the number of valid tokens in the whole step")
        if pairs is not None:
            return preference_loss(
                hidden_BSD, self.weight, labels_BS, valid_count, self.loss_of_logits, pairs, self.products
            )
        return chunked_loss(
            hidden_BSD, self.weight, labels_BS, valid_count, self.loss_of_logits, products=self.products
        )

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """Logits over the whole vocabulary."""
        return F.linear(hidden_BSD, self.weight)


class Products:
    """The three products of a head with one weight, a chunk of tokens at a time; W as products take the vocabulary."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_WD = _with_zeros(weight_VD)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Of a chunk; those of rows of zeros are zero."""
        return hidden_ND @ self.weight_WD.t()

    def gradients(
        self, grad_NW: Tensor, hidden_ND: Tensor, grad_hidden_ND: Tensor, grad_weight_WD: Tensor | None
    ) -> None:
        """Write a chunk's gradient of the hidden states, and add its share of the weight's."""
        torch.mm(grad_NW, self.weight_WD, out=grad_hidden_ND)
        if grad_weight_WD is not None:
            add_product(grad_weight_WD, grad_NW.t(), hidden_ND)


def chunked_loss(
    hidden_BSD: Tensor,
    weight_VD: Tensor,
    labels_BS: Tensor,
    valid_count: Tensor | float,
    loss: LossOfLogits,
    factors_N: Tensor | None = None,
    products: type[Products] = Products,
) -> Tensor:
    """Σ cross-entropy / valid_count from hidden states, a chunk of tokens at a time.

    With factors the gradient is that of Σ factor × cross-entropy / valid_count; the value is not.
    """
    result: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_BSD.flatten(0, -2), weight_VD, labels_BS.flatten(), valid_count, loss, factors_N, products
    )
    return result


def preference_loss(
    hidden_BSD: Tensor,
    weight_VD: Tensor,
    labels_BS: Tensor,
    valid_count: Tensor | float,
    loss: LossOfLogits,
    pairs: Pairs,
    products: type[Products] = Products,
) -> Tensor:
    """Σ over pairs of their loss / valid_count; without gradients what `Pairs.sums` gives instead.

    A token's gradient depends on all tokens of both answers, so the logits are computed twice: for the answers' sums,
    and for the gradients.
    """
    with torch.no_grad():
        losses_N = _token_losses(hidden_BSD.flatten(0, -2), weight_VD, labels_BS.flatten(), loss, products)
        totals = pairs.sums(losses_N, labels_BS)
    if not torch.is_grad_enabled():
        return totals
    value, factors_N = pairs.loss(totals)
    by_tokens = chunked_loss(hidden_BSD, weight_VD, labels_BS, valid_count, loss, factors_N, products)
    return value / valid_count + (by_tokens - by_tokens.detach())


def _token_losses(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, loss: LossOfLogits, products: type[Products]
) -> Tensor:
    """Every token's cross-entropy, a chunk at a time."""
    head, vocabulary = products(weight_VD), weight_VD.shape[0]
    none_N1 = hidden_ND.new_zeros(len(hidden_ND), 1, dtype=wide_dtype(hidden_ND.dtype))
    rows = chunk_rows(hidden_ND.shape[0], vocabulary, weight_VD.element_size())
    losses = []
    for start in range(0, hidden_ND.shape[0], rows):
        chunk = slice(start, start + rows)
        logits_NV = head.logits(hidden_ND[chunk])[:, :vocabulary]
        losses.append(loss(logits_NV, labels_N[chunk].unsqueeze(1), none_N1[chunk], False)[0].flatten())
    return torch.cat(losses)


def loss_of_logits(
    logits_NV: Tensor, labels_N1: Tensor, shares_N1: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The cross-entropy of some tokens and its gradient by the logits, which may overwrite them."""
    if logits_NV.is_cuda and HAS_TRITON and wide_dtype(logits_NV.dtype) == torch.float32:
        # Hand-written, since the compiler's kernel writes the gradient to new memory: twice as much, and of what it
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
    losses_N1 = torch.where(valid_N1, total_N1.log() - own_N1, 0.0)
    if not with_gradient:
        return losses_N1, None
    grad_NV = powers_NV.mul_(shares_N1 / total_N1).to(logits_NV.dtype)
    at_target_N1 = (own_N1.exp() / total_N1 - 1) * shares_N1
    return losses_N1, grad_NV.scatter_(1, target_N1, at_target_N1.to(grad_NV.dtype))


class _ChunkedLoss(torch.autograd.Function):
    """Cross-entropy by chunks of tokens, each adding its share of both gradients before the next starts."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        valid_count: Tensor | float,
        loss_of_logits: LossOfLogits,
        factors_N: Tensor | None,
        products: type[Products],
    ) -> Tensor:
        wide = wide_dtype(hidden_ND.dtype)
        with_gradients = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if with_gradients else None
        head, vocabulary = products(weight_VD), weight_VD.shape[0]
        grad_weight_WD = torch.zeros_like(head.weight_WD, dtype=wide) if ctx.needs_input_grad[1] else None
        # A step without a single valid token has loss 0, not 0 / 0.
        count = torch.where(valid_count > 0, valid_count, 1) if isinstance(valid_count, Tensor) else valid_count or 1
        shares_N1 = ((labels_N != IGNORE).to(wide) / count).unsqueeze(1)
        if factors_N is not None:
            shares_N1 = shares_N1 * factors_N.unsqueeze(1)

        rows = chunk_rows(hidden_ND.shape[0], vocabulary, weight_VD.element_size())
        for start in range(0, hidden_ND.shape[0], rows):
            chunk = slice(start, start + rows)
            hidden = hidden_ND[chunk]
            logits_NW = head.logits(hidden)
            own_NV, labels_N1 = logits_NW[:, :vocabulary], labels_N[chunk].unsqueeze(1)
            part, grad = loss_of_logits(own_NV, labels_N1, shares_N1[chunk], with_gradients)
            loss += part.sum()
            if grad is not None and grad_hidden_ND is not None:
                grad = _of_every_column(grad, logits_NW)
                head.gradients(grad, hidden, grad_hidden_ND[chunk], grad_weight_WD)
            del logits_NW, own_NV, grad  # the next chunk's logits reuse their memory

        if grad_hidden_ND is not None:
            grad_weight_VD = None if grad_weight_WD is None else grad_weight_WD[:vocabulary].to(weight_VD.dtype)
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        # Not `grads[0] * …`, which on a GPU reads and writes one number at a time because one factor is a single one.
        parts = [grad for grad in (grad_hidden_ND, grad_weight_VD) if grad is not None]
        scaled = foreach_mul(parts, grads[0].to(grad_hidden_ND.dtype))
        return scaled[0], scaled[1] if len(scaled) > 1 else None, None, None, None, None, None


def _with_zeros(weight_VD: Tensor) -> Tensor:
    """On a GPU the weight with rows of zeros up to a size that products are fast with, else the weight itself."""
    vocabulary = weight_VD.shape[0]
    missing = in_whole_lines(vocabulary) - vocabulary if weight_VD.is_cuda else 0
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD


def _of_every_column(grad_NV: Tensor, logits_NW: Tensor) -> Tensor:
    """The gradient by all logits, those of the zeros included, which are zero where it overwrote them."""
    missing = logits_NW.shape[1] - grad_NV.shape[1]
    if missing and grad_NV.data_ptr() == logits_NW.data_ptr():
        return logits_NW
    return F.pad(grad_NV, (0, missing)) if missing else grad_NV


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, kept wide where the device can multiply narrow numbers into wide ones."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
