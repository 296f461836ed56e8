"""Line charts as inline SVG, written by hand: a plotting library would add megabytes to every report."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshwright.studio.curves import Point, finite, thin
from meshwright.studio.numbers import short

LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 40
"""Margins around the plot area, in pixels."""
_LOG_ABOVE = 50  # a curve whose largest value is this many times its smallest reads better on a logarithmic axis
_MOST_MARKS = 40


@dataclass(frozen=True)
class Series:
    """One curve; `style` is its CSS class and decides colour and weight."""

    label: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Scale:
    """A mapping from values to pixels along one axis, with its ticks."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        position = math.log10(value) if self.log else value
        return self.start + (position - low) / (high - low) * (self.end - self.start)


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    wide: bool = False,
    from_zero: bool = False,
    marks: Sequence[float] = (),
    bad: Sequence[float] = (),
    axis: str = "step",
) -> str:
    """A figure of curves over steps, or another `axis` of whole numbers.

    `marks` are dashed lines (restarts), `bad` are steps without a finite value.
    """
    width, height = (1080, 330) if wide else (530, 250)
    drawn = [Series(one.label, one.style, thin(one.points)) for one in series if finite(one.points)]
    head = f"<figcaption>{heading(title, unit)}{legend(drawn, dashed='restart' if marks and wide else '')}</figcaption>"
    size = "wide" if wide else "half"
    if not drawn:
        return f'<figure class="chart {size}">{head}<p class="empty">No finite value was recorded.</p></figure>'

    steps = [step for one in series for step, _ in one.points]
    values = [value for one in drawn for value in finite(one.points)]
    x = _step_scale(min(steps), max(steps), width)
    y = _value_scale(min(values), max(values), from_zero, height)
    body = "".join(
        [
            axes(x, y, unit, width, height, axis),
            "".join(vertical(x(step), "mark", height) for step in list(marks)[:_MOST_MARKS]),
            "".join(_bad_mark(x(step), height) for step, _ in thin([(step, 0.0) for step in bad])),
            "".join(_path(one, x, y) for one in drawn),
            f'<g class="cursor" visibility="hidden">{vertical(0, "hair", height)}</g>',
        ]
    )
    label = escape(f"{title}: {', '.join(one.label for one in drawn)} over {axis}s")
    return (
        f'<figure class="chart {size}">{head}'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{body}</svg>'
        f'<p class="readout" aria-live="off">&nbsp;</p>{_hover_data(drawn, x, y, axis)}</figure>'
    )


def nice_ticks(low: float, high: float, wanted: int) -> tuple[float, ...]:
    """Round numbers between low and high, about as many as wanted."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
    first = math.ceil(low / gap - 1e-9)
    return tuple(round(index * gap, 12) for index in range(first, math.floor(high / gap + 1e-9) + 1))


def _step_scale(low: float, high: float, width: int) -> Scale:
    if low == high:
        low, high = low - 1, high + 1
    elif 0 < low <= 0.05 * high:
        low = 0  # an axis that starts at step 1 has no round number to start with
    ticks = nice_ticks(low, high, 8 if width > 600 else 5)
    whole = tuple(tick for tick in ticks if tick == int(tick))
    return Scale(low, high, LEFT, width - RIGHT, False, whole)


def _value_scale(low: float, high: float, from_zero: bool, height: int) -> Scale:
    log = not from_zero and low > 0 and high / low > _LOG_ABOVE
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if len(decades) <= 3 else (1,)
        ticks = tuple(factor * 10.0**decade for decade in decades for factor in factors)
        low, high = low / 1.15, high * 1.15
    else:
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = (min(0.0, low) if from_zero else low - margin), high + margin
        ticks = nice_ticks(low, high, 5)
    return Scale(low, high, height - BOTTOM, TOP, log, tuple(tick for tick in ticks if low <= tick <= high))


def axes(x: Scale, y: Scale, unit: str, width: int, height: int, axis: str = "step", *, plural: bool = True) -> str:
    """Both axes with their ticks and names, and a grid at the values' ticks; `axis` is one of what is counted, unless
    it is not `plural`."""
    parts = []
    for tick in y.ticks:
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{at + 3.5:.1f}">{short(tick)}</text>')
    base = height - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{base}" y2="{base}"/>')
    for tick in x.ticks:
        at = x(tick)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{base + 17}">{short(tick)}</text>')
    middle = (TOP + base) / 2
    unit = f"{unit}, log scale" if y.log else unit
    parts.append(
        f'<text class="unit" text-anchor="middle" transform="translate(11 {middle:.0f}) rotate(-90)">'
        f"{escape(unit)}</text>"
        f'<text class="unit" text-anchor="middle" x="{(LEFT + width - RIGHT) / 2:.0f}" y="{height - 6}">'
        f"{escape(axis)}{'s' if plural else ''}</text>"
    )
    return "".join(parts)


def _path(one: Series, x: Scale, y: Scale) -> str:
    """The curve in unbroken segments; a segment of one point is a dot, since a line of zero length is invisible."""
    pieces: list[list[str]] = [[]]
    for step, value in one.points:
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{x(step):.1f} {y(value):.1f}")
    lines = " ".join("M" + "L".join(piece) for piece in pieces if len(piece) > 1)
    dotted = [piece[0] for piece in pieces if len(piece) == 1]
    if one.style == "validation" and len(one.points) <= 2 * _MOST_MARKS:
        dotted = [at for piece in pieces for at in piece]
    dots = "".join('<circle class="{}" cx="{}" cy="{}" r="2.6"/>'.format(one.style, *at.split()) for at in dotted)
    return (f'<path class="line {one.style}" d="{lines}"/>' if lines else "") + dots


def vertical(at: float, style: str, height: int) -> str:
    """A vertical line over the whole height."""
    return f'<line class="{style}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'


def _bad_mark(at: float, height: int) -> str:
    base = height - BOTTOM
    return f'<path class="bad" d="M{at - 3:.1f} {base - 7}l6 6m0-6l-6 6"/>'


def heading(title: str, unit: str) -> str:
    """A chart's title, with the unit for narrow pages where it does not fit next to the axis."""
    small = "" if unit == title.lower() else f" <small>{escape(unit)}</small>"
    return f"<h3>{escape(title)}{small}</h3>"


def legend(series: Sequence[Series], dashed: str = "") -> str:
    """The curves' names and colours, omitted for a single curve, and the meaning of dashed lines."""
    keys = [f'<span><i class="key {one.style}"></i>{escape(one.label)}</span>' for one in series if len(series) > 1]
    keys += [f'<span><i class="key marked"></i>{escape(dashed)}</span>'] if dashed else []
    if not keys:
        return ""
    return f'<span class="legend">{"".join(keys)}</span>'


def _hover_data(series: Sequence[Series], x: Scale, y: Scale, axis: str) -> str:
    """Data for the read-out, as JSON for the page's script; the chart is complete without it."""
    data = {
        "axis": axis,
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end, int(y.log)],
        "series": [
            {
                "label": one.label,
                "style": one.style,
                "x": [step for step, value in one.points if value is not None],
                "y": [float(f"{value:.5g}") for _, value in one.points if value is not None],
            }
            for one in series
        ],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
