"""Simulated tables drawn as SVG: the rows and the time axis, and a whole file of several tables."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from meshwright.pipeline.simulate import Simulation, Span
from meshwright.pipeline.table import Kind, Table
from meshwright.pipeline.text import common_time

_WIDTH, _MARGIN = 1160, 16
_ROW, _GAP = 24, 3  # a rank's row, and the gap within it
_HEAD, _FOOT = 34, 20  # space above a panel's rows for its title, and below them
_TOP, _AXIS = 92, 34  # title and legend; the time axis at the bottom

# Dark for a rank's first stage (level 0), light for its last; text white on dark, dark on light.
_LEVELS = 4
_COLOURS = {
    Kind.FORWARD: ("#1f5fa8", "#a9cdf2"),
    Kind.BACKWARD: ("#1e7a4c", "#a5dcbd"),
    Kind.INPUT: ("#0f7f86", "#9fdde0"),
    Kind.WEIGHT: ("#b4600f", "#f6cf9f"),
}
KIND_NAMES = {
    Kind.FORWARD: "forward (F)",
    Kind.BACKWARD: "whole backward (B)",
    Kind.INPUT: "gradient of the input (I)",
    Kind.WEIGHT: "gradient of the weights (W)",
}
_STYLE = (
    "text{font-family:ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1d2733}"
    ".h{font-size:19px;font-weight:700}.n{font-size:14px;font-weight:700}.s{font-size:12px;fill:#4a5866}"
    ".tick{font-size:11px;fill:#4a5866}.on{font-size:10px;fill:#fff}.on.small{font-size:8px}"
    ".on.level-2,.on.level-3{fill:#1d2733}.idle{fill:#e4e8ec}.grid{stroke:#d5dbe1}"
)


@dataclass(frozen=True)
class Frame:
    """Where time is drawn: from the pixel `left` on, `scale` pixels a unit, until `until_s`; `row` pixels a rank."""

    left: float
    scale: float
    until_s: float
    row: int = _ROW

    def x(self, at_s: float) -> float:
        return self.left + at_s * self.scale


def draw_ranks(table: Table, simulation: Simulation, labels: Mapping[int, str], frame: Frame, top: int) -> str:
    """A row for each rank that has a label; what ends after the frame is left out."""
    end_s = min(simulation.makespan_s, frame.until_s)
    width = end_s * frame.scale
    parts = []
    for place, (rank, label) in enumerate(labels.items()):
        y = top + place * frame.row
        parts.append(_tick(frame.left - 8, y + frame.row / 2 + 2.5, "end", label))
        parts.append(
            f'<rect class="idle" x="{frame.left:.1f}" y="{y}" width="{width:.1f}" height="{frame.row - _GAP}"/>'
        )
        parts += _bars(table, [span for span in simulation.spans_of(rank) if span.end_s <= end_s], frame, y)
    return "".join(parts)


def draw_axis(frame: Frame, bottom: int, unit: str = "time", per_unit: float = 1.0) -> str:
    """The axis below the rows: round numbers of a unit of which there are `per_unit` in one of time."""
    rough = frame.until_s * per_unit / 12
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    end = frame.x(frame.until_s)
    parts = [f'<line class="grid" x1="{frame.left:.1f}" x2="{end:.1f}" y1="{bottom}" y2="{bottom}"/>']
    for tick in range(int(frame.until_s * per_unit / gap + 1e-9) + 1):
        x = frame.x(tick * gap / per_unit)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(_tick(x, bottom + 19, "middle", f"{tick * gap:g}"))
    return "".join([*parts, _tick(frame.left - 8, bottom + 19, "end", unit)])


def gantt_svg(runs: Sequence[tuple[Table, Simulation]]) -> str:
    """A file that shows one or more simulated tables with the same ranks and micro-batches on one time scale."""
    table = runs[0][0]
    frame = _frame_around(runs)
    panel = _HEAD + table.ranks * _ROW + _FOOT
    bottom = _TOP + panel * len(runs)
    parts = [_title(table, len(runs)), _legend(runs)]
    parts += [_panel(*run, frame, _TOP + panel * index) for index, run in enumerate(runs)]
    parts.append(draw_axis(frame, bottom))
    height = bottom + _AXIS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(_heading(table))}"><style>{_STYLE}{_colour_style()}</style>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _frame_around(runs: Sequence[tuple[Table, Simulation]]) -> Frame:
    labels = [_label(table, rank) for table, _ in runs for rank in range(table.ranks)]
    left = _MARGIN + 5.6 * max(map(len, labels)) + 8
    until_s = common_time([simulation for _, simulation in runs])
    return Frame(left, (_WIDTH - left - _MARGIN) / until_s, until_s)


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
            f'<text class="s" x="{x + 34}" y="75.5">{KIND_NAMES[kind]}</text>'
        )
        x += 34 + 6 * len(KIND_NAMES[kind]) + 26
    parts.append(f'<rect class="idle" x="{x}" y="64" width="28" height="14"/>')
    parts.append(f'<text class="s" x="{x + 34}" y="75.5">idle: the bubble</text>')
    return "".join(parts)


def _panel(table: Table, simulation: Simulation, frame: Frame, top: int) -> str:
    end_s = min(simulation.makespan_s, frame.until_s)
    figures = (
        f"bubble {simulation.bubble_over_ideal:.1%} of ideal time, {simulation.bubble_share_of_step:.1%} of the step"
        f" · in flight {_listed(table.stage_size * count for count in simulation.in_flight)}"
        f" · ends at {simulation.makespan_s:g}"
    )
    figures += " (cut in the picture)" if simulation.makespan_s > end_s else ""
    figures += f" · {table.parameter_copies} copies of the parameters" if table.parameter_copies > 1 else ""
    figures += f" · weight versions {_listed(table.weight_versions)}" if max(table.weight_versions) > 1 else ""
    title = (
        f'<text x="{_MARGIN}" y="{top + 20}"><tspan class="n">{escape(table.schedule)}</tspan>'
        f'<tspan class="s" dx="12">{escape(figures)}</tspan></text>'
    )
    labels = {rank: _label(table, rank) for rank in range(table.ranks)}
    return title + draw_ranks(table, simulation, labels, frame, top + _HEAD)


def _bars(table: Table, spans: Sequence[Span], frame: Frame, y: int) -> list[str]:
    """One shape for all bars of a colour, and numbers where they fit."""
    starts = Counter(span.start_s for span in spans)
    shapes: dict[str, str] = {}
    numbers, above = [], -1.0
    for span in spans:
        # Of an overlapped pair the forward is drawn above, the backward below.
        height = (frame.row - _GAP) / starts[span.start_s]
        top = y + height if span.start_s == above else y
        above = span.start_s
        x, width = frame.x(span.start_s), (span.end_s - span.start_s) * frame.scale
        level = _level(table, span)
        shape = f"M{x + 0.5:.1f} {top:g}h{max(width - 1, 0.5):.1f}v{height:g}H{x + 0.5:.1f}z"
        colour = f"act-{span.action.kind.value} level-{level}"
        shapes[colour] = shapes.get(colour, "") + shape
        label = str(span.action.micro_batch)
        size = next((size for size in (10, 8) if width >= 0.6 * size * len(label)), None)
        if size:
            style = f"on level-{level}" + " small" * (size == 8)
            middle = f'x="{x + width / 2:.1f}" y="{top + height / 2 + 0.36 * size:.1f}"'
            numbers.append(f'<text class="{style}" text-anchor="middle" {middle}>{label}</text>')
    return [f'<path class="{colour}" d="{shape}"/>' for colour, shape in shapes.items()] + numbers


def _level(table: Table, span: Span) -> int:
    stages = table.stages_of(span.rank)
    return round((_LEVELS - 1) * stages.index(span.action.stage) / max(len(stages) - 1, 1))


def _tick(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="tick" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{text}</text>'


def _colour_style() -> str:
    return "".join(
        f".act-{kind.value}.level-{level}{{fill:{_between(dark, light, level / (_LEVELS - 1))}}}"
        for kind, (dark, light) in _COLOURS.items()
        for level in range(_LEVELS)
    )


def _between(dark: str, light: str, part: float) -> str:
    ends = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (dark, light)]
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(*ends, strict=True))


def _listed(counts: Iterable[float]) -> str:
    return " ".join(f"{count:.3g}" for count in counts)
