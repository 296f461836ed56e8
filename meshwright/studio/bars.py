"""A prediction as bars: the memory of every pipeline rank relative to the GPU, and where a step's time goes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from meshwright.studio.chart import nice_ticks
from meshwright.studio.numbers import short

if TYPE_CHECKING:
    from meshwright.plan import Prediction, RankMemory

GIB = 2**30
TINTS, TIME_TINTS = 13, 16
"""Classes mem-0 … and time-0 … of the style sheet: one per term of memory, and one per phase of a step."""
WIDTH, NARROW = 1080, 400
"""Every drawing is made for a page and for a phone, where the first would be too small to read."""
_TOP = 26
_MOST_RANKS = 32
_SMALLEST_SHARE = 0.002


@dataclass(frozen=True)
class Bars:
    """A drawing, its size, and the class of each name in it, which is its colour."""

    title: str
    body: str
    width: int
    height: float
    tints: Mapping[str, str]


def memory_bars(prediction: "Prediction") -> str:
    """A bar for every pipeline rank, its terms stacked, with the GPU's memory as a line."""
    bars = [draw_memory(prediction, width) for width in (WIDTH, NARROW)]
    left_out = len(prediction.memory) - len(_shown(prediction.memory))
    note = f'<p class="note foot">{left_out} ranks in the middle are not shown.</p>' if left_out else ""
    return figure_of(bars, "memory", legend_of(bars[0].tints), note)


def draw_memory(prediction: "Prediction", width: int = WIDTH) -> Bars:
    """Only the bars of `memory_bars`."""
    ranks = _shown(prediction.memory)
    parts = [_parts(rank) for rank in ranks]
    most = max(prediction.capacity_bytes, prediction.fullest.device)
    tints = tints_of([name for one in parts for name, _ in one], [size for one in parts for _, size in one], most)
    row = 34 if len(ranks) <= 8 else 22
    height = _TOP + row * len(ranks) + 34
    left, scale = left_of(width), room_of(width) / (1.04 * most)
    drawn, totals = [], []
    for place, (rank, terms) in enumerate(zip(ranks, parts, strict=True)):
        y, x = _TOP + row * place, float(left)
        drawn.append(
            f'<text class="tick" text-anchor="end" x="{left - 8}" y="{y + row / 2 + 1:.0f}">{rank.rank}</text>'
        )
        for name, size in terms:
            title = f"<title>{escape(name)}: {size / GIB:.2f} GiB</title>"
            box = f'x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{row - 6}"'
            drawn.append(f'<rect class="{tints[name]}" {box}>{title}</rect>')
            x += size * scale
        total = f'x="{x + 6:.1f}" y="{y + row / 2 + 1:.0f}">{rank.device / GIB:.1f}'
        totals.append(f'<text class="tick total" {total}</text>')
    limit = left + prediction.capacity_bytes * scale
    base = _TOP + row * len(ranks)
    drawn.append(f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{_TOP - 8}" y2="{base}"/>')
    drawn += totals  # over the line, which may be where a bar ends
    words = f"GPU memory: {prediction.capacity_bytes / GIB:.0f} GiB"
    drawn.append(f'<text class="tick" text-anchor="end" x="{min(limit + 55, width):.1f}" y="12">{words}</text>')
    drawn.append(axis_below(1.04 * most / GIB, base, width, "GiB on the device, by pipeline rank"))
    return Bars("Memory of each stage", "".join(drawn), width, height, tints)


def step_bar(prediction: "Prediction") -> str:
    """The step as one bar of its phases, with a table."""
    bars = [draw_step(prediction, width) for width in (WIDTH, NARROW)]
    rows = [
        f'<tr><th scope="row"><i class="swatch {bars[0].tints[name]}"></i>{escape(name)}</th>'
        f'<td class="number">{1e3 * seconds:,.2f}</td>'
        f'<td class="number">{seconds / prediction.step_s:.1%}</td></tr>'
        for name, seconds in _phases(prediction).items()
    ]
    table = (
        '<table class="phases"><thead><tr><th scope="col">phase</th><th scope="col" class="number">ms</th>'
        f'<th scope="col" class="number">share</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )
    return figure_of(bars, "breakdown", "", table)


def draw_step(prediction: "Prediction", width: int = WIDTH) -> Bars:
    """Only the bar of `step_bar`."""
    phases = _phases(prediction)
    tints = {name: f"time-{place % TIME_TINTS}" for place, name in enumerate(phases)}
    scale = room_of(width) / prediction.step_s
    drawn, x = [], float(left_of(width))
    for name, seconds in phases.items():
        report = f"{1e3 * seconds:.2f} ms, {seconds / prediction.step_s:.1%}"
        box = f'x="{x:.1f}" y="6" width="{seconds * scale:.1f}" height="40"'
        drawn.append(f'<rect class="{tints[name]}" {box}><title>{escape(name)}: {report}</title></rect>')
        x += seconds * scale
    drawn.append(axis_below(prediction.step_s * 1e3, 46, width, "ms of a step, along its busiest pipeline rank"))
    return Bars("Time of a step", "".join(drawn), width, 80, tints)


def left_of(width: int) -> int:
    return 64 if width == WIDTH else 28


def room_of(width: int) -> int:
    """What the margins leave of a width."""
    return width - left_of(width) - (60 if width == WIDTH else 40)


def _phases(prediction: "Prediction") -> dict[str, float]:
    return {name: seconds for name, seconds in prediction.phases.items() if seconds > 0}


def _shown(memory: Sequence["RankMemory"]) -> list["RankMemory"]:
    """All ranks, or the first and the last if there are too many to read."""
    half = _MOST_RANKS // 2
    return list(memory) if len(memory) <= _MOST_RANKS else [*memory[:half], *memory[-half:]]


def _parts(rank: "RankMemory") -> list[tuple[str, float]]:
    outside = {"rounding and holes": rank.fragments, "driver and communicators": rank.outside}
    return [(name, size) for name, size in (rank.terms | outside).items() if size > 0]


def tints_of(names: Sequence[str], sizes: Sequence[float], most: float) -> dict[str, str]:
    """A colour for every term; those too small to see share the last one."""
    large = dict.fromkeys(name for name, size in zip(names, sizes, strict=True) if size > _SMALLEST_SHARE * most)
    tints = {name: min(place, TINTS - 1) for place, name in enumerate(large)}
    return {name: f"mem-{tints.get(name, TINTS - 1)}" for name in dict.fromkeys(names)}


def axis_below(most: float, base: float, width: int, words: str) -> str:
    left, scale = left_of(width), room_of(width) / most
    ticks = [
        f'<text class="tick below" text-anchor="middle" x="{left + tick * scale:.1f}" y="{base + 15:.0f}">'
        f"{short(tick)}</text>"
        for tick in nice_ticks(0.0, most, 6)
    ]
    middle = left + room_of(width) / 2
    return (
        "".join(ticks) + f'<text class="unit" text-anchor="middle" x="{middle:.0f}" y="{base + 31:.0f}">{words}</text>'
    )


def legend_of(tints: Mapping[str, str]) -> str:
    keys = "".join(f'<span><i class="swatch {tint}"></i>{escape(name)}</span>' for name, tint in tints.items())
    return f'<p class="legend">{keys}</p>'


def figure_of(sizes: Sequence[Bars], kind: str, legend: str, below: str) -> str:
    title = sizes[0].title
    drawn = "".join(
        f'<svg class="{"broad" if bars.width == WIDTH else "narrow"}" viewBox="0 0 {bars.width} {bars.height:.0f}" '
        f'role="img" aria-label="{title}">{bars.body}</svg>'
        for bars in sizes
    )
    return (
        f'<figure class="picture {kind}"><figcaption><h3>{title}</h3></figcaption>{legend}'
        f'<div class="bars">{drawn}</div>{below}</figure>'
    )
