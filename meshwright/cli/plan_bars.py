"""The lines and cells with which `meshwright plan` says how sure it is."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwright.plan import ErrorBars, Prediction

GIB = 2**30


def interval(ends: "Iterable[float]", form: str = ",.0f") -> str:
    """`8,300–11,400`, or the one value that both are rounded to."""
    first, last = (format(end, form) for end in ends)
    return first if first == last else f"{first}–{last}"


def bar_lines(bars: "ErrorBars", prediction: "Prediction") -> list[str]:
    """The interval of an answer, and what it rests on."""
    per, room = prediction.per, prediction.capacity_bytes
    rate = interval(bars.tokens_per_s_per_gpu)
    step = interval(bars.step_s, ".3g")
    size = interval((size / GIB for size in bars.device_bytes), ".1f")
    short = prediction.fullest.device <= room < bars.device_bytes[1]
    warning = f"memory may not suffice: the upper end of its interval is more than the {room / GIB:.0f} GiB there are"
    return [
        f"{bars.level:.0%} interval: {rate} tokens/s per {per}, {step} s per step, {size} GiB",
        *([warning] if short else []),
        f"evidence for time: {bars.evidence}",
        f"evidence for memory: {bars.memory_evidence}",
    ]
