"""Points in a plane as inline SVG: layouts by memory and speed, a colour for every cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshwright.studio.chart import BOTTOM, LEFT, RIGHT, TOP, Scale, axes, nice_ticks

_WIDTH, _HEIGHT = 760, 330
_TINTS = 12


@dataclass(frozen=True)
class Cloud:
    """The points of one colour: x, y, whether it is among the best, and its words."""

    label: str
    points: Sequence[tuple[float, float, bool, str]]


def scatter(title: str, across: str, up: str, clouds: Sequence[Cloud]) -> str:
    """A figure: the best points are filled and joined by a line, the others are rings."""
    xs = [x for cloud in clouds for x, *_ in cloud.points]
    ys = [y for cloud in clouds for _, y, *_ in cloud.points]
    x, y = _scale(xs, LEFT, _WIDTH - RIGHT), _scale(ys, _HEIGHT - BOTTOM, TOP)
    body = "".join(_drawn(cloud, x, y, place % _TINTS, (across, up)) for place, cloud in enumerate(clouds))
    keys = "".join(
        f'<span><i class="swatch tint-{place % _TINTS}"></i>{escape(cloud.label)}</span>'
        for place, cloud in enumerate(clouds)
    )
    label = escape(f"{title}: {up} over {across}")
    return (
        f'<figure class="picture scatter"><figcaption><h3>{escape(title)}</h3><span class="legend">{keys}</span>'
        f'</figcaption><div class="scroll"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{axes(x, y, up, _WIDTH, _HEIGHT, across, plural=False)}{body}</svg></div>"
        '<p class="note foot">Rings are layouts that another beats in time, memory and cost.</p></figure>'
    )


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    high = 1.05 * max(values)
    return Scale(0.0, high, start, end, False, tuple(tick for tick in nice_ticks(0.0, high, 6) if tick <= high))


def _drawn(cloud: Cloud, x: Scale, y: Scale, tint: int, units: tuple[str, str]) -> str:
    best = sorted((at, value) for at, value, kept, _ in cloud.points if kept)
    line = "L".join(f"{x(at):.1f} {y(value):.1f}" for at, value in best)
    path = f'<path class="joined tint-{tint}" d="M{line}"/>' if len(best) > 1 else ""
    dots = "".join(
        f'<circle class="{"kept" if kept else "beaten"} tint-{tint}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="4">'
        f"<title>{escape(f'{cloud.label}: {words}; {at:.1f} {units[0]}, {value:,.0f} {units[1]}')}</title></circle>"
        for at, value, kept, words in cloud.points
    )
    return path + dots
