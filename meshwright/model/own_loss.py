"""A loss of the user's own in the head's chunks: a function of whole rows of logits, differentiated by autograd.

N tokens, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.model.numbers import IGNORE, wide_dtype
from meshwright.registries import LOSSES

OwnLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits_NV, labels_N) to the loss of every token."""


def own_loss_of_logits(name: str) -> Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]:
    """The head's way to compute a registered loss; tokens without a label are given label 0 and count for nothing."""
    loss: OwnLoss = LOSSES.find(name)

    def loss_of_logits(
        logits_NV: Tensor, labels_N1: Tensor, shares_N1: Tensor, with_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        valid_N = labels_N1.squeeze(1) != IGNORE
        wide_NV = logits_NV.detach().to(wide_dtype(logits_NV.dtype)).requires_grad_(with_gradient)
        with torch.set_grad_enabled(with_gradient):
            each_N = loss(wide_NV, torch.where(valid_N, labels_N1.squeeze(1), 0))
            if each_N.shape != valid_N.shape:
                raise UserError(
                    f'model.loss = "{name}" gives a tensor of shape {list(each_N.shape)} for {len(valid_N)} tokens; '
                    'return one number for each, as cross_entropy(..., reduction="none") does'
                )
            counted_N = torch.where(valid_N, each_N, 0.0)
            if not with_gradient:
                return counted_N.detach(), None
            [grad_NV] = torch.autograd.grad((counted_N * shares_N1.squeeze(1)).sum(), wide_NV)
        return counted_N.detach(), grad_NV.to(logits_NV.dtype)

    return loss_of_logits
