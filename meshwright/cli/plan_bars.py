"""The lines and cells with which `meshwright plan` says how sure it is."""

from typing import TYPE_CHECKING, Any

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


def coverage_lines(summary: dict[str, Any]) -> list[str]:
    """How many of the rows of `--validate` are in their intervals: other programs', and ours by source."""
    lines = []
    own = {row["id"].rpartition("-")[0] for row in summary["rows"] if row["use"] == "own"}
    for kind in ("time", "memory"):
        covered = summary["coverage"][kind]
        ours = {f"own runs {name}": held for name, held in covered["sources"].items() if name in own}
        for name, held in ({"published": covered["all"]} | ours).items():
            if held["rows"]:
                share = f"{held['inside']} of {held['rows']} rows in their 80% interval ({held['share']:.1%})"
                lines.append(f"{kind}, {name}: {share}")
    return lines


def own_lines(summary: dict[str, Any]) -> list[str]:
    """The errors of our own trainer's runs, if there are any."""
    own = summary["own"]
    if not own["predicted"]:
        return []
    time, memory = own["median_abs_time_error"], own["median_abs_memory_error"]
    return [f"own runs: {own['predicted']} predicted, time {time:.1%} and memory {memory:.1%} off in the median"]
