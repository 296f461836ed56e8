"""Simulated tables as one SVG picture: a panel per schedule, all on the same time scale."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from meshwright.pipeline.simulate import Simulation, Span
from meshwright.pipeline.table import Kind, Table
from meshwright.pipeline.text import common_time

_WIDTH, _MARGIN = 1160, 16
_ROW, _GAP = 21, 3
_HEAD, _FOOT = 34, 20  # room above a panel's rows for its title, below them before the next
_TOP, _AXIS = 92, 34  # title and legend; the time axis at the bottom

# Dark for a rank's first stage, light for its last; text white on dark, dark on light.
_COLOURS = {
    Kind.FORWARD: ("#1f5fa8", "#a9cdf2"),
    Kind.BACKWARD: ("#1e7a4c", "#a5dcbd"),
    Kind.INPUT: ("#0f7f86", "#9fdde0"),
    Kind.WEIGHT: ("#b4600f", "#f6cf9f"),
}
_NAMES = {
    Kind.FORWARD: "forward (F)",
    Kind.BACKWARD: "whole backward (B)",
    Kind.INPUT: "gradient of the input (I)",
    Kind.WEIGHT: "gradient of the weights (W)",
}
_STYLE = (
    "text{font-family:ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1d2733}"
    ".h{font-size:19px;font-weight:700}.n{font-size:14px;font-weight:700}.s{font-size:12px;fill:#4a5866}"
    ".r{font-size:11px;fill:#4a5866;text-anchor:end}.t{font-size:11px;fill:#4a5866;text-anchor:middle}"
    ".m10,.m8{font-size:10px;text-anchor:middle}.m8{font-size:8px}.w{fill:#fff}.track{fill:#e4e8ec}.grid{stroke:#d5dbe1}"
)


def gantt_svg(runs: Sequence[tuple[Table, Simulation]]) -> str:
    """A picture of one or more simulated tables with the same ranks and micro-batches."""
    table = runs[0][0]
    frame = _Frame.around(runs)
    panel = _HEAD + table.ranks * (_ROW + _GAP) + _FOOT
    bottom = _TOP + panel * len(runs)
    parts = [_title(table, len(runs)), _legend(runs)]
    parts += [_panel(*run, frame, _TOP + panel * index) for index, run in enumerate(runs)]
    parts.append(_axis(frame, bottom))
    height = bottom + _AXIS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(_heading(table))}"><style>{_STYLE}{_colour_style(runs)}</style>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


@dataclass(frozen=True)
class _Frame:
    """Where time is drawn: from the pixel `left` on, `scale` pixels a unit, until `until_s`."""

    left: float
    scale: float
    until_s: float

    @classmethod
    def around(cls, runs: Sequence[tuple[Table, Simulation]]) -> "_Frame":
        labels = [_label(table, rank) for table, _ in runs for rank in range(table.ranks)]
        left = _MARGIN + 5.6 * max(map(len, labels)) + 8
        until_s = common_time([simulation for _, simulation in runs])
        return cls(left, (_WIDTH - left - _MARGIN) / until_s, until_s)

    def x(self, at_s: float) -> float:
        return self.left + at_s * self.scale


def _label(table: Table, rank: int) -> str:
    stages = ", ".join(str(stage) for stage in table.stages_of(rank))
    return f"rank {rank} · stage{'s' * (table.virtual_stages > 1)} {stages}"


def _heading(table: Table) -> str:
    return f"Pipeline schedules: {table.ranks} ranks, {table.micro_batches} micro-batches"


def _title(table: Table, panels: int) -> str:
    note = "one step of each schedule on one time scale; " if panels > 1 else ""
    note += "the number is the micro-batch, dark a rank's first stage, light its last"
    heading = f'<text class="h" x="{_MARGIN}" y="30">{_heading(table)}</text>'
    return f'{heading}<text class="s" x="{_MARGIN}" y="50">{note}</text>'


def _legend(runs: Sequence[tuple[Table, Simulation]]) -> str:
    kinds = {action.kind for table, _ in runs for order in table.orders for action in order}
    parts, x = [], _MARGIN
    for kind in (kind for kind in Kind if kind in kinds):
        dark, light = _COLOURS[kind]
        parts.append(
            f'<rect x="{x}" y="64" width="14" height="14" fill="{dark}"/>'
            f'<rect x="{x + 14}" y="64" width="14" height="14" fill="{light}"/>'
            f'<text class="s" x="{x + 34}" y="75.5">{_NAMES[kind]}</text>'
        )
        x += 34 + 6 * len(_NAMES[kind]) + 26
    parts.append(f'<rect class="track" x="{x}" y="64" width="28" height="14"/>')
    parts.append(f'<text class="s" x="{x + 34}" y="75.5">idle: the bubble</text>')
    return "".join(parts)


def _panel(table: Table, simulation: Simulation, frame: _Frame, top: int) -> str:
    end_s = min(simulation.makespan_s, frame.until_s)
    figures = (
        f"bubble {simulation.bubble_over_ideal:.1%} of ideal time, {simulation.bubble_share_of_step:.1%} of the step"
        f" · in flight {_listed(table.stage_size * count for count in simulation.in_flight)}"
        f" · ends at {simulation.makespan_s:g}"
    )
    figures += " (cut in the picture)" if simulation.makespan_s > end_s else ""
    figures += f" · {table.parameter_copies} copies of the parameters" if table.parameter_copies > 1 else ""
    figures += f" · weight versions {_listed(table.weight_versions)}" if max(table.weight_versions) > 1 else ""
    parts = [
        f'<text x="{_MARGIN}" y="{top + 20}"><tspan class="n">{escape(table.schedule)}</tspan>'
        f'<tspan class="s" dx="12">{escape(figures)}</tspan></text>'
    ]
    for rank in range(table.ranks):
        y = top + _HEAD + rank * (_ROW + _GAP)
        width = end_s * frame.scale
        parts.append(f'<text class="r" x="{frame.left - 8:.1f}" y="{y + 14.5}">{_label(table, rank)}</text>')
        parts.append(f'<rect class="track" x="{frame.left:.1f}" y="{y}" width="{width:.1f}" height="{_ROW}"/>')
        parts += _bars(table, [span for span in simulation.spans_of(rank) if span.end_s <= end_s], frame, y)
    return "".join(parts)


def _bars(table: Table, spans: Sequence[Span], frame: _Frame, y: int) -> list[str]:
    starts = Counter(span.start_s for span in spans)
    parts, above = [], -1.0
    for span in spans:
        # Of an overlapped pair the forward is drawn above, the backward below.
        height = _ROW / starts[span.start_s]
        top = y + height if span.start_s == above else y
        above = span.start_s
        x, width = frame.x(span.start_s), (span.end_s - span.start_s) * frame.scale
        shade, ink = _shade(table, span)
        box = f'x="{x + 0.5:.1f}" y="{top:g}" width="{max(width - 1, 0.5):.1f}" height="{height:g}"'
        parts.append(f'<rect class="{shade}" {box}/>')
        label = str(span.action.micro_batch)
        size = next((size for size in (10, 8) if width >= 0.6 * size * len(label)), None)
        if size:
            middle = f'x="{x + width / 2:.1f}" y="{top + height / 2 + 0.36 * size:.1f}"'
            parts.append(f'<text class="m{size} {ink}" {middle}>{label}</text>')
    return parts


def _shade(table: Table, span: Span) -> tuple[str, str]:
    """The classes of a bar and of the number on it."""
    stages = table.stages_of(span.rank)
    level = stages.index(span.action.stage)
    return f"{span.action.kind.value}{level}-{len(stages)}", "d" if level * 2 >= len(stages) else "w"


def _colour_style(runs: Sequence[tuple[Table, Simulation]]) -> str:
    rules = []
    for count in sorted({table.virtual_stages for table, _ in runs}):
        for kind, (dark, light) in _COLOURS.items():
            for level in range(count):
                colour = _between(dark, light, level / max(count - 1, 1))
                rules.append(f".{kind.value}{level}-{count}{{fill:{colour}}}")
    return "".join(rules)


def _between(dark: str, light: str, part: float) -> str:
    ends = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (dark, light)]
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(*ends, strict=True))


def _axis(frame: _Frame, bottom: int) -> str:
    rough = frame.until_s / 12
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    end = frame.x(frame.until_s)
    parts = [f'<line class="grid" x1="{frame.left:.1f}" x2="{end:.1f}" y1="{bottom}" y2="{bottom}"/>']
    for tick in range(int(frame.until_s / gap + 1e-9) + 1):
        x = frame.x(tick * gap)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text class="t" x="{x:.1f}" y="{bottom + 19}">{tick * gap:g}</text>')
    parts.append(f'<text class="r" x="{frame.left - 8:.1f}" y="{bottom + 19}">time</text>')
    return "".join(parts)


def _listed(counts: Iterable[float]) -> str:
    return " ".join(f"{count:.3g}" for count in counts)
