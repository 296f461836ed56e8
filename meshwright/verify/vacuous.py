"""Whether equal numbers prove anything: what is zero, is not dropped or goes one way is equal in every layout."""

from collections.abc import Collection

from torch import Tensor

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.verify.observe import Observation
from meshwright.verify.replay import Choices

NAMED = 3
"""Parameters that an error names."""
MOST_ALIKE = 0.95
"""Share of a layer's tokens that may choose the same experts."""
FEWEST_TOKENS = 8
"""Fewer tokens may all choose the same by chance."""
FEWEST_FOR_EACH = 8
"""Tokens for each expert on average, below which one may get none by chance: of evenly spread ones, one in 3000 does
at this many."""


class Vacuous(UserError):
    """A check whose numbers are equal and prove nothing about a part of the job."""


def require_exercised(job: Job, unexercised: Collection[str]) -> None:
    """Refuse a check in which nothing but rounding errors arrives at some parameters."""
    if unexercised:
        more = f" and {len(unexercised) - NAMED} more" if len(unexercised) > NAMED else ""
        some = ", ".join(list(unexercised)[:NAMED]) + more
        raise Vacuous(
            f"run.seed = {job.run.seed}: only rounding errors arrive as the gradient of {some}, so that equal numbers "
            "would prove nothing about it; set another run.seed, or leave out what is never trained"
        )


def require_dropping(job: Job, alone: Observation) -> None:
    """Refuse a check of experts with a capacity that drop no token in one process."""
    experts = job.model.experts
    if experts is not None and experts.capacity is not None and not any(alone.metrics["expert_dropped"]):
        raise Vacuous(
            f"model.experts.capacity = {experts.capacity:g}: no token was dropped in the checked steps, so that equal "
            "numbers would prove nothing about it; lower it or set another run.seed"
        )


def require_routing(job: Job, choices: Choices) -> None:
    """Refuse a check in which a layer's routing is so uniform that equal numbers prove nothing about it."""
    experts = job.model.experts
    assert experts is not None
    if experts.top_k == experts.count:
        return  # every token uses all of them: there is no choice
    for layer in sorted(choices.by_layer):
        chosen_TK = choices.trained(layer)
        if (seen := _alike(chosen_TK) or _idle(chosen_TK, experts.count)) is not None:
            raise Vacuous(
                f"run.seed = {job.run.seed}: in layer {layer} {seen} in the checked steps, so that equal numbers would "
                "prove little about the routing; set another run.seed, or verify more tokens with --steps"
            )


def _alike(chosen_TK: Tensor) -> str | None:
    """Which experts nearly all tokens choose, in words."""
    sets, counts = chosen_TK.sort(-1).values.unique(dim=0, return_counts=True)  # type: ignore[no-untyped-call]
    most, tokens = int(counts.max()), len(chosen_TK)
    if tokens < FEWEST_TOKENS or most <= MOST_ALIKE * tokens:
        return None
    who = "all" if most == tokens else f"{most} of"
    return f"{who} {tokens} tokens choose {_named(sets[counts.argmax()].tolist())}"


def _idle(chosen_TK: Tensor, count: int) -> str | None:
    """Which experts get no token, in words."""
    loads = chosen_TK.flatten().bincount(minlength=count)
    idle = (loads == 0).nonzero().flatten().tolist()
    if not idle or chosen_TK.numel() < FEWEST_FOR_EACH * count:
        return None
    return f"{_named(idle)} get{'s' * (len(idle) == 1)} none of {len(chosen_TK)} tokens"


def _named(experts: list[int]) -> str:
    return f"expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}"
