"""How much rounding changes what is computed from pairs of answers: by the sums that their small differences are of.

A margin is a difference of sums of log-probabilities, two of each answer if there is a reference. Of tokens that all
err alike, as those do that share a rounded weight, a sum s errs by ε·|s|, with ε = √R·u over the roundings of the
forward. So the difference within a pair errs by ε·size, where size is √2 times the sum of both answers' |s| with a
reference, and that sum without. From there on everything is a smooth function of it:

margin     β·ε·size.
dpo        the slope of −log σ(x) is at most 1, so the loss errs by β·ε·size; a token's gradient has the factor
           β·σ(−x), whose relative error is at most that, too.
ipo        (d − 1/2β)² of means over tokens: the loss errs by 2·√loss·δ + δ² for δ = ε·size per token, its gradient's
           factor by δ/√loss.
orpo       the chosen answer's own mean, and β times a log-ratio of odds, whose slope by a mean of log-probabilities is
           1/(1 − p): (1 + β/(1 − p))·δ for the loss and β/(1 − p)·δ for the factor.
"""

import math
from dataclasses import dataclass

import torch

from meshwright.job import Job, Preference
from meshwright.verify.observe import Observation


@dataclass(frozen=True)
class PairSizes:
    """Means over held-out pairs, in one process before the first step."""

    settings: Preference
    sums: float
    """|log-probability| of both answers together."""
    means: float
    """The same per token."""
    certainty: float
    """The probability of a token, by the mean of its logarithm."""

    @classmethod
    def of(cls, job: Job, exact: Observation) -> "PairSizes | None":
        """Of a job that learns from pairs and evaluates; None for others."""
        if exact.answers is None:
            return None
        sums_N2 = exact.answers.sums_N2.abs()
        means_N2 = sums_N2 / exact.answers.counts_N2.clamp(min=1)
        times = math.sqrt(2.0) if job.preference.needs_reference else 1.0
        certainty = float(torch.exp(-means_N2).mean())
        sums, means = (times * float(numbers_N2.sum(-1).mean()) for numbers_N2 in (sums_N2, means_N2))
        return cls(job.preference, sums, means, certainty)

    @property
    def margin_size(self) -> float:
        """The size of what a margin is a difference of."""
        return self.settings.beta * (self.means if self.settings.loss == "orpo" else self.sums)

    def loss_error(self, loss: float, unit: float) -> float:
        """The error of a loss, relative to it, if sums err by this share of themselves."""
        beta, delta = self.settings.beta, unit * self.means
        if self.settings.loss == "dpo":
            error = beta * unit * self.sums
        elif self.settings.loss == "ipo":
            error = 2 * math.sqrt(loss) * delta + delta**2
        else:
            error = (1 + self._odds_slope) * delta
        return error / loss

    def factor_error(self, loss: float, unit: float) -> float:
        """The relative error of what a pair multiplies its tokens' gradients by."""
        if self.settings.loss == "dpo":
            return self.settings.beta * unit * self.sums
        delta = unit * self.means
        return delta / math.sqrt(loss) if self.settings.loss == "ipo" else self._odds_slope * delta

    @property
    def _odds_slope(self) -> float:
        return self.settings.beta / (1 - min(0.99, self.certainty))
