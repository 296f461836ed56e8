"""A chart of what a rank held in its first steps: kinds of memory, stacked."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from meshwright.amounts import size, size_unit
from meshwright.studio.chart import BOTTOM, LEFT, RIGHT, TOP, Scale, Series, axes, heading, legend, nice_ticks, vertical

KINDS = ("other", "parameters", "optimizer", "gradients", "activations")
"""From bottom to top: what changes least is lowest."""

_WIDTH, _HEIGHT = 1080, 360
_MOST_SAMPLES = 800
_MOST_STEPS = 32
_WORTH_TELLING_BYTES = 2**20  # optimizers keep counters on the host
_MOMENTS = {
    "start": "start",
    "forward": "after layer {layer}’s forward",
    "forward_end": "forward done",
    "backward": "before layer {layer}’s backward",
    "recompute": "while layer {layer} is recomputed",
    "backward_end": "backward done",
    "reduced": "gradients summed",
    "updated": "weights updated",
    "end": "gradients freed",
}


def memory_chart(rows: Sequence[dict[str, Any]]) -> str:
    """The memory curve as a section of a report; empty if none was recorded."""
    if not rows:
        return ""
    places, kept = _places(rows), _thinned(rows)
    samples, x_values = [rows[index] for index in kept], [places[index] for index in kept]
    unit, unit_name = size_unit(max(map(_total, samples)))
    x, y = _scales(samples, unit)
    layers = _layers(samples, unit)

    areas = "".join(_area(layer, x_values, x, y) for layer in layers)
    boundaries = "".join(vertical(x(step), "mark", _HEIGHT) for step in x.ticks[1:])
    cursor = f'<g class="cursor" visibility="hidden">{vertical(0, "hair", _HEIGHT)}</g>'
    body = axes(x, y, unit_name, _WIDTH, _HEIGHT) + areas + boundaries + cursor
    names = legend([Series(layer.kind, f"kind-{layer.kind}", ()) for layer in layers])
    return (
        f'<h2>Memory in the first steps</h2><figure class="chart wide"><figcaption>{heading("By kind", unit_name)}'
        f'{names}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Memory by kind over the first steps">{body}</svg>'
        f'<p class="readout" aria-live="off">&nbsp;</p>{_hover_data(samples, layers, x_values, x, y)}'
        f'<p class="note foot">{escape(_note(samples))}</p></figure>'
    )


@dataclass(frozen=True)
class _Layer:
    """One kind's values, and the heights between which they are drawn."""

    kind: str
    own: list[float]
    floor: list[float]
    roof: list[float]


def _layers(samples: Sequence[dict[str, Any]], unit: int) -> list[_Layer]:
    layers: list[_Layer] = []
    floor = [0.0] * len(samples)
    for kind in KINDS:
        own = [_bytes(row, kind) / unit for row in samples]
        if any(own):
            layers.append(_Layer(kind, own, floor, [below + value for below, value in zip(floor, own, strict=True)]))
            floor = layers[-1].roof
    return layers


def _scales(samples: Sequence[dict[str, Any]], unit: int) -> tuple[Scale, Scale]:
    first, last = (end(row["step"] for row in samples) for end in (min, max))
    few = last - first < _MOST_STEPS
    ticks = range(first, last + 1) if few else map(int, nice_ticks(first, last + 1, _MOST_STEPS // 4))
    steps = tuple(map(float, ticks))
    top = 1.06 * max(map(_total, samples)) / unit or 1.0
    x = Scale(float(first), last + 1.0, LEFT, _WIDTH - RIGHT, False, steps)
    return x, Scale(0.0, top, _HEIGHT - BOTTOM, TOP, False, nice_ticks(0.0, top, 5))


def _hover_data(
    samples: Sequence[dict[str, Any]], layers: Sequence[_Layer], x_values: list[float], x: Scale, y: Scale
) -> str:
    """Data for the read-out, as JSON for the page's script."""
    series = [
        {
            "label": layer.kind,
            "style": f"kind-{layer.kind}",
            "x": x_values,
            "y": [_rounded(value) for value in layer.own],
            "top": [_rounded(value) for value in layer.roof],
        }
        for layer in layers
    ]
    scales = {"x": [x.low, x.high, x.start, x.end], "y": [y.low, y.high, y.start, y.end, 0]}
    data = {**scales, "series": series, "labels": [_moment(row) for row in samples]}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def _places(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The position of each sample: all steps are equally wide, and their samples are spread evenly."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["step"]] = counts.get(row["step"], 0) + 1
    places, seen = [], dict.fromkeys(counts, 0)
    for row in rows:
        step = row["step"]
        places.append(round(step + seen[step] / counts[step], 5))
        seen[step] += 1
    return places


def _thinned(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Few enough samples to draw: the largest of each group of neighbours."""
    buckets = min(len(rows), _MOST_SAMPLES)
    edges = [bucket * len(rows) // buckets for bucket in range(buckets + 1)]
    return [max(range(start, end), key=lambda index: _total(rows[index])) for start, end in pairwise(edges)]


def _area(layer: _Layer, x_values: list[float], x: Scale, y: Scale) -> str:
    there = [f"{x(at):.1f} {y(value):.1f}" for at, value in zip(x_values, layer.roof, strict=True)]
    back = [f"{x(at):.1f} {y(value):.1f}" for at, value in zip(x_values, layer.floor, strict=True)]
    return f'<path class="area kind-{layer.kind}" d="M{"L".join([*there, *reversed(back)])}Z"/>'


def _moment(row: dict[str, Any]) -> str:
    # Only our own texts are format strings, never what a file contains.
    words = _MOMENTS[row["at"]].format(layer=row["layer"]) if row["at"] in _MOMENTS else row["at"]
    micro_batch = f" (micro-batch {row['micro_batch']})" if row.get("micro_batch") else ""
    return f"step {row['step']}, {words}{micro_batch}"


def _note(samples: Sequence[dict[str, Any]]) -> str:
    fullest = max(samples, key=_total)
    parts = [f"Rank {fullest['rank']}: most at {_moment(fullest)}, {size(_total(fullest))}."]
    if any(row["other_bytes"] is None for row in samples):
        parts.append("Memory outside the known kinds is not counted on a CPU.")
    if any(row["activations_bytes"] is None for row in samples):
        parts.append("Activations of compiled blocks are not counted on a CPU.")
    if (host := max(row["host_bytes"] for row in samples)) >= _WORTH_TELLING_BYTES:
        parts.append(f"In host memory: {size(host)} at most.")
    return " ".join(parts)


def _bytes(row: dict[str, Any], kind: str) -> int:
    return row[f"{kind}_bytes"] or 0


def _total(row: dict[str, Any]) -> int:
    return sum(_bytes(row, kind) for kind in KINDS)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
