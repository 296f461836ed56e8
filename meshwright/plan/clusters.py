"""One job on several clusters, and how many nodes a training needs to end in time or within a budget."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.job.devices import Cluster
from meshwright.plan.economy import Economy, economy
from meshwright.plan.error_bars import ErrorBars, error_bars
from meshwright.plan.machine import spelled
from meshwright.plan.question import Found, Question, find_layouts

NODES = tuple(sorted({base * 2**power for base in (1, 3) for power in range(12)}))
"""Numbers of nodes that are tried: powers of two and half-way between."""
Ask = Callable[[str | Cluster], Question]
"""The question on other machines."""


@dataclass(frozen=True)
class Machines:
    """What a job takes on some machines, or why it does not run there."""

    spelling: str
    found: Found | None
    economy: Economy | None
    """Of the whole training, if its tokens are known."""
    price: float | None
    """Of a GPU-hour."""
    why: str = ""

    @property
    def gpus(self) -> int:
        """In all; 0 where nothing was found."""
        if self.found is None:
            return 0
        cluster = self.found.question.machines
        return cluster.nodes * cluster.gpus_per_node

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs with the fastest layout."""
        return 0.0 if self.found is None else self.found.search.best[0].prediction.tokens_per_s_per_gpu * self.gpus

    @property
    def bars(self) -> ErrorBars | None:
        """How sure the prediction of the fastest layout is; None where nothing was found."""
        if self.found is None:
            return None
        best = self.found.search.best[0]
        return error_bars(best.job, self.found.question.machines, best.prediction)

    @property
    def gpu_hours_per_billion(self) -> float | None:
        """GPU-hours for 10⁹ tokens, without failures."""
        return 1e9 / self.tokens_per_s * self.gpus / 3600 if self.tokens_per_s else None

    @property
    def cost_per_billion(self) -> float | None:
        """Cost of 10⁹ tokens, if the price of an hour is known."""
        hours = self.gpu_hours_per_billion
        return None if hours is None or self.price is None else hours * self.price


def on_machines(
    ask: Ask, spellings: Sequence[str], allow: Collection[str], tokens: float | None, price: float | None
) -> list[Machines]:
    """The fastest layout on each of the clusters; `64xh100@2.5` gives a price of its own."""
    return [_on(ask, *priced(spelling, price), allow, tokens) for spelling in spellings]


def priced(spelling: str, price: float | None) -> tuple[str, float | None]:
    """A cluster's name and the price of its GPU-hour: its own after an @, else the given one."""
    name, at, own = spelling.partition("@")
    if not at:
        return name, price
    try:
        value = float(own)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise UserError(f"--compare has {spelling}, whose price {own!r} is not a number above 0; write {name}@2.5")
    return name, value


def _on(
    ask: Ask, cluster: str | Cluster, price: float | None, allow: Collection[str], tokens: float | None
) -> Machines:
    asked = ask(cluster)
    each = asked.machines.price if price is None else price
    try:
        found = find_layouts(asked, 1, allow)
    except UserError as error:
        return Machines(spelled(asked.machines), None, None, each, str(error))
    best = found.search.best[0]
    whole = None if tokens is None else economy(best.job, best.prediction, asked.machines, tokens, each)
    return Machines(spelled(asked.machines), found, whole, each)


def enough_machines(
    ask: Ask,
    node: Cluster,
    allow: Collection[str],
    tokens: float,
    price: float | None,
    *,
    days: float | None,
    budget: float | None,
) -> tuple[list[Machines], Machines | None]:
    """How many of these nodes a training takes: the fewest that end within `days`, or, with a `budget` alone, the most
    that it pays for. All that were tried, by size, and the answer; None if no number does.

    More nodes end sooner and, as they use each GPU less well, cost more: so sizes are halved, not tried one by one.
    """
    tried: dict[int, Machines] = {}

    def at(place: int) -> Machines:
        nodes = NODES[place]
        if nodes not in tried:
            sized = node.model_copy(update={"nodes": nodes})
            tried[nodes] = _on(ask, sized, price, allow, tokens)
        return tried[nodes]

    def in_time(one: Machines) -> bool:
        return one.economy is not None and days is not None and one.economy.days <= days

    def paid(one: Machines) -> bool:
        cost = None if one.economy is None else one.economy.cost
        return budget is None or (cost is not None and cost <= budget)

    low, high = 0, len(NODES) - 1
    while low < high:
        middle = (low + high) // 2
        one = at(middle)
        # Too few nodes hold no layout at all; too many cannot share the batch.
        larger = _too_few(one) or (not in_time(one) if days is not None else one.found is not None and paid(one))
        low, high = (middle + 1, high) if larger else (low, middle)
    places = range(max(0, low - 2), min(len(NODES), low + 3))
    around = [at(place) for place in places]
    good = [one for one in around if one.found is not None and paid(one) and (days is None or in_time(one))]
    rows = [tried[nodes] for nodes in sorted(tried)]
    if not good:
        return rows, None
    return rows, min(good, key=lambda one: one.gpus) if days is not None else max(good, key=lambda one: one.gpus)


def _too_few(one: Machines) -> bool:
    """Whether nothing was found because it does not fit, rather than because the batch cannot be shared."""
    return one.found is None and "spreads evenly" not in one.why
