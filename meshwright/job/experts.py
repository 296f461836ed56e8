"""The [model.experts] table: a mixture of experts in place of the feed-forward of most layers."""

from fractions import Fraction
from math import ceil
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from meshwright.job.section import Section

BALANCING = ("balance_loss", "z_loss", "balance_rate", "force_balance", "capacity")
"""The fields that are a choice of each training; the others describe the model."""


class Experts(Section):
    """How many experts a layer has, how tokens choose among them, and how their load is balanced."""

    count: PositiveInt = Field(le=10**5)
    """Experts per layer."""
    top_k: PositiveInt = Field(le=10**5)
    """Experts that each token is sent to."""
    ffn_width: PositiveInt = Field(le=10**7)
    """Inner size of one expert."""
    shared_width: NonNegativeInt = Field(default=0, le=10**7)
    """Inner size of the feed-forward that every token passes besides its experts; 0 for none. Several shared experts
    are one of their total size."""
    first_dense: NonNegativeInt = Field(default=0, le=10**4)
    """The first layers, which have a plain feed-forward of model.ffn_width instead (DeepSeek)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's results become scores, in 32 bits: over all experts, or each by itself (DeepSeek-V3)."""
    normalised: bool = True
    """Whether the weights of a token's experts are divided by their sum (not in OLMoE and DeepSeek-V2)."""
    scale: PositiveFloat = Field(default=1.0, le=1e6)
    """A factor on the weights of a token's experts (DeepSeek)."""
    groups: PositiveInt = Field(default=1, le=10**5)
    """Groups of neighbouring experts, of which a token uses only some (DeepSeek)."""
    groups_kept: PositiveInt = Field(default=1, le=10**5)
    """How many groups a token's experts may come from; a group counts as much as its best expert, with sigmoid scores
    as its best two, if it has two."""
    swiglu_limit: PositiveFloat | None = Field(default=None, le=1e6)
    """gpt-oss's experts: gate and up are clamped at this, the sigmoid is that of 1.702 × gate, and 1 is added to up;
    none by default."""
    balance_loss: NonNegativeFloat = Field(default=0.0, le=1e6)
    """Factor of a loss that is smallest when each sequence uses all experts equally (0.001 to 0.01 is usual)."""
    z_loss: NonNegativeFloat = Field(default=0.0, le=1e6)
    """Factor of a loss on the square of the router's log-sum-exp, which keeps its results small (0.001 is usual)."""
    balance_rate: NonNegativeFloat = Field(default=0.0, le=1e6)
    """Balance without a loss: after a step, an expert that got fewer tokens than the mean is preferred by this much
    more, one that got more by this much less (DeepSeek-V3: 0.001)."""
    force_balance: bool = False
    """For benchmarks only: ignore the router's choice and give all experts equally many tokens."""
    capacity: float | None = Field(default=None, le=1e6)
    """In training, a limit on the tokens of one sequence that an expert takes, as a factor of an equal share
    (top_k × sequence_length / count), rounded up. Earlier tokens come first, later ones do without this expert (GShard;
    1.25 is usual). None, the default, computes all of them."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_k > self.count:
            raise ValueError(
                f"model.experts.top_k = {self.top_k} is more than model.experts.count = {self.count}; lower it"
            )
        if self.count % self.groups:
            raise ValueError(
                f"model.experts.groups = {self.groups} does not divide model.experts.count = {self.count}; choose a "
                "divisor"
            )
        if self.groups_kept > self.groups:
            raise ValueError(
                f"model.experts.groups_kept = {self.groups_kept} is more than model.experts.groups = {self.groups}; "
                "lower it"
            )
        if self.top_k > self.groups_kept * (self.count // self.groups):
            raise ValueError(
                f"model.experts.top_k = {self.top_k} is more than the {self.groups_kept * self.count // self.groups} "
                f"experts of groups_kept = {self.groups_kept} groups; raise groups_kept"
            )
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(
                f"model.experts.capacity = {self.capacity:g} is not a factor above 0; set it to 1.25, or leave it out "
                "to drop no tokens"
            )
        return self

    def most_tokens(self, sequence: int) -> int | None:
        """Tokens of a sequence of this length that an expert takes in training, at most; None without a limit."""
        if self.capacity is None:
            return None
        # The factor as it is written: in floating point 1.1 × 20 is above 22.
        return ceil(Fraction(str(self.capacity)) * self.top_k * sequence / self.count)
