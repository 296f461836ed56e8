"""The whole training of a plan: days and cost of its tokens, or the tokens of some days."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.amounts import NoAmount, amount
from meshwright.studio.numbers import count
from meshwright.studio.page_words import FieldError, in_page_words, label

if TYPE_CHECKING:
    from meshwright.job.devices import Cluster
    from meshwright.plan import Candidate

FIELDS = ("tokens", "days", "price", "pue", "co2")
"""The fields of a request that change no layout."""
_MOST = {"tokens": 1e18, "days": 1e5, "price": 1e6, "budget": 1e12}
_DAY_S = 86400.0


@dataclass(frozen=True)
class Training:
    """What the form says of it; None is not given."""

    tokens: float | None
    days: float | None
    price: float | None

    def of(self, one: "Candidate", cluster: "Cluster") -> dict[str, Any] | None:
        """Tokens, days, GPU-hours and cost with one layout; None if neither tokens nor days are given."""
        from meshwright.plan import economy

        if self.tokens is None and self.days is None:
            return None
        rate = one.prediction.tokens_per_s_per_gpu * cluster.nodes * cluster.gpus_per_node
        tokens = rate * _DAY_S * (self.days or 0.0) if self.tokens is None else self.tokens
        found = economy(one.job, one.prediction, cluster, tokens, self.price)
        late = self.days is not None and self.tokens is not None and found.days > self.days
        return {
            "tokens": tokens,
            "tokens_words": count(tokens),
            "days": found.days,
            "gpu_hours": found.gpu_hours,
            "cost": found.cost,
            "late": late,
            "energy": None if found.energy is None else in_page_words(found.energy.sentence),
        }

    def sentence(self, best: "Candidate | None", cluster: "Cluster") -> str:
        """The whole training with the fastest layout."""
        found = self.of(best, cluster) if best is not None else None
        if found is None:
            return ""
        words = f"{count(found['tokens'])} tokens: {found['days']:,.1f} days, {found['gpu_hours']:,.0f} GPU-hours"
        words += "" if found["cost"] is None else f", cost {found['cost']:,.0f}"
        if found["late"] and self.days:
            words += f"; that is {found['days'] / self.days:.2g} times the {self.days:g} days wanted"
        energy = found["energy"]
        return f"{words}. Failures are not counted." + (f" {energy[0].upper()}{energy[1:]}." if energy else "")


def training(state: dict[str, Any]) -> Training:
    """The whole training of a page's state; an error names what is invalid."""
    found = Training(*(amount_of(state, name) for name in ("tokens", "days", "price")))
    if found.price is not None and found.tokens is None and found.days is None:
        raise FieldError("price", "Price is of a whole training; give its Tokens or Days, too")
    return found


def amount_of(state: dict[str, Any], name: str) -> float | None:
    """A number as people write it: 300e9, 15T, 1.4B."""
    given = state.get(name)
    if given is None or given == "":
        return None
    try:
        value = amount(given)
    except NoAmount:
        value = 0.0
    if not 0 < value <= _MOST[name]:
        remedy = "write it as 15T, 2e12 or 1400000" if name == "tokens" else f"give one up to {_MOST[name]:,.0f}"
        raise FieldError(name, f"{label(name)} = {str(given)[:40]} is not an amount above 0; {remedy}")
    return value
