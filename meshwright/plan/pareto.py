"""Layouts of which none is beaten in time, memory and cost at once, on one cluster or over several."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from meshwright.plan.machine import machine_of, spelled
from meshwright.plan.question import Question
from meshwright.plan.search import Candidate, search

_POINTS = 12
_APART = 0.9
"""Each further layout of a cluster must take at least 10% less memory: nearer ones are not worth a choice."""
GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """One layout on one cluster."""

    spelling: str
    gpus: int
    one: Candidate
    price: float | None
    """Of a GPU-hour."""

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs."""
        return self.one.prediction.tokens_per_s_per_gpu * self.gpus

    @property
    def memory_gib(self) -> float:
        """Of the fullest GPU."""
        return self.one.prediction.fullest.device / GIB

    @property
    def gpu_hours_per_billion(self) -> float:
        """GPU-hours for 10⁹ tokens, without failures."""
        return 1e9 / self.one.prediction.tokens_per_s_per_gpu / 3600

    @property
    def cost_per_billion(self) -> float | None:
        """Cost of 10⁹ tokens, if the price of an hour is known."""
        return None if self.price is None else self.gpu_hours_per_billion * self.price


def choices(
    asked: Question, price: float | None, allow: Collection[str] = (), stop: Callable[[], None] = lambda: None
) -> list[Choice]:
    """On one cluster, the fastest layout, then the fastest that takes 10% less memory than that, and so on."""
    machine, machines = machine_of(asked.machines), asked.machines
    each = machines.price if price is None else price
    found: list[Choice] = []
    room = float("inf")
    while len(found) < _POINTS:
        stop()
        best = search(asked.job, machine, 1, allow, at_most_bytes=room).best
        if not best:
            break
        found.append(Choice(spelled(machines), machine.gpus, best[0], each))
        room = _APART * best[0].prediction.fullest.device
    return found


def frontier(candidates: Sequence[Choice]) -> list[Choice]:
    """Those that no other beats or equals in time, memory and cost, and beats in one; fastest first.

    Cost is money if every price is known, and GPU-hours if not.
    """
    paid = all(one.price is not None for one in candidates)

    def figures(one: Choice) -> tuple[float, float, float]:
        cost = one.cost_per_billion if paid and one.cost_per_billion is not None else one.gpu_hours_per_billion
        return 1.0 / one.tokens_per_s, one.memory_gib, cost

    def beats(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
        return left != right and all(a <= b for a, b in zip(left, right, strict=True))

    points = [(figures(one), one) for one in candidates]
    kept = [one for own, one in points if not any(beats(other, own) for other, _ in points)]
    return sorted(kept, key=lambda one: -one.tokens_per_s)


def frontier_words(kept: int, tried: Sequence[Choice]) -> str:
    """What the table is."""
    paid = all(one.price is not None for one in tried)
    hint = "" if paid else "; cost is GPU-hours, as not every price is given"
    return f"{kept} of {len(tried)} layouts, none of them beaten in all of time, memory per GPU and cost{hint}"
