"""Losses over pairs of answers, from the sum of log-probabilities of each answer's tokens.

B sequences, S places, N = B × S tokens, P the most pairs in a sequence; an axis of 2 is chosen, rejected.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.job import Preference
from meshwright.model.numbers import IGNORE


@dataclass
class Tally:
    """Rewards added up over forwards: of chosen answers, of rejected ones, and how many pairs are in the right order,
    of which those with equal rewards count half."""

    sums_3: Tensor | None = None

    def add(self, sums_3: Tensor) -> None:
        """Some more pairs."""
        self.sums_3 = sums_3 if self.sums_3 is None else self.sums_3 + sums_3

    def take(self) -> Tensor | None:
        """The sums since this was last called; None if there was no pair."""
        taken, self.sums_3 = self.sums_3, None
        return taken


@dataclass(frozen=True)
class Pairs:
    """The pairs in some sequences: which tokens belong to which answer, and what the reference gives each answer."""

    answers_BS: Tensor
    """For every place its answer's number, (sequence × P + pair) × 2, and one more if rejected; any where no label
    is."""
    present_BP: Tensor
    """Which pairs there are."""
    references_BP2: Tensor
    """The reference's sums of log-probabilities."""
    settings: Preference
    tally: Tally = field(default_factory=Tally)
    add_up: Callable[[Tensor], None] | None = None
    """Adds a tensor up, in place, over the ranks that share these sequences."""
    sharing: int = 1
    """How many ranks share them; each computes the same losses and returns its share of them."""

    def sums(self, losses_N: Tensor, labels_BS: Tensor) -> Tensor:
        """Of every answer the sum of its tokens' log-probabilities, and their number (2, B, P, 2)."""
        counts_N = (labels_BS != IGNORE).flatten().to(losses_N.dtype)
        totals = losses_N.new_zeros(2, self.present_BP.numel() * 2)
        totals.index_add_(1, self.answers_BS.flatten(), torch.stack([-losses_N, counts_N]))
        if self.add_up is not None:
            self.add_up(totals)
        return totals.view(2, *self.present_BP.shape, 2)

    def loss(self, totals: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the pairs' losses from what `sums` gives, and its gradient by every token's cross-entropy (N)."""
        sums_BP2 = totals[0].detach().requires_grad_()
        with torch.enable_grad():
            references_BP2 = self.references_BP2.to(sums_BP2.dtype)
            losses_BP, rewards_BP2 = pair_losses(sums_BP2, totals[1], references_BP2, self.settings)
            loss = torch.where(self.present_BP, losses_BP, 0.0).sum()
        [gradient_BP2] = torch.autograd.grad(loss, sums_BP2)
        self.tally.add(tallied(rewards_BP2.detach(), self.present_BP) / self.sharing)
        return loss.detach() / self.sharing, -gradient_BP2.flatten()[self.answers_BS.flatten()]


def pair_losses(
    sums_BP2: Tensor, counts_BP2: Tensor, references_BP2: Tensor, settings: Preference
) -> tuple[Tensor, Tensor]:
    """The loss of every pair and the rewards of its answers, from sums of log-probabilities and numbers of tokens."""
    counts_BP2 = counts_BP2.clamp(min=1)
    if settings.loss == "orpo":
        # Odds are finite only below certainty; a pair that is not there has a sum of 0.
        means_BP2 = (sums_BP2 / counts_BP2).clamp(max=-1e-9)
        odds_BP2 = means_BP2 - torch.log(-torch.expm1(means_BP2))
        own_BP = -means_BP2[..., 0]
        return own_BP - settings.beta * F.logsigmoid(odds_BP2[..., 0] - odds_BP2[..., 1]), settings.beta * means_BP2
    ratios_BP2 = sums_BP2 - references_BP2
    rewards_BP2 = settings.beta * ratios_BP2
    if settings.loss == "ipo":
        means_BP2 = ratios_BP2 / counts_BP2
        return (means_BP2[..., 0] - means_BP2[..., 1] - 1 / (2 * settings.beta)) ** 2, rewards_BP2
    margin_BP = rewards_BP2[..., 0] - rewards_BP2[..., 1]
    smoothing = settings.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(margin_BP) - smoothing * F.logsigmoid(-margin_BP), rewards_BP2


def tallied(rewards_BP2: Tensor, present_BP: Tensor) -> Tensor:
    """The three sums of a tally over the pairs that are there."""
    chosen_BP, rejected_BP = rewards_BP2.unbind(-1)
    right_BP = ((chosen_BP - rejected_BP).sign() + 1) / 2
    return torch.stack([torch.where(present_BP, each, 0.0).sum() for each in (chosen_BP, rejected_BP, right_BP)])
