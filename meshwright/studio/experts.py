"""A picture of the load of experts: every expert of every layer, by how many tokens it got."""

from collections.abc import Sequence
from html import escape
from typing import Any

EXPERTS = "experts"
"""The kind of event that records the load."""

_WIDTH, _LEFT, _TOP, _HIGHEST_ROW = 1080, 60, 18, 18
_MOST_CELLS = 40_000


def experts_chart(events: Sequence[dict[str, Any]]) -> str:
    """The last recorded load as a section of a report; empty if the model has no experts."""
    recorded = [event for event in events if event["kind"] == EXPERTS]
    if not recorded:
        return ""
    step, first, tokens = recorded[-1]["step"], recorded[-1]["first_layer"], recorded[-1]["tokens"]
    layers, count = len(tokens), len(tokens[0])
    if layers * count > _MOST_CELLS:
        return f'<h2>Experts</h2><p class="note">{layers:,} × {count:,} experts are too many to draw.</p>'
    wide, high = (_WIDTH - _LEFT) / count, min(_HIGHEST_ROW, 400 / layers)
    cells = "".join(
        _cell(_LEFT + expert * wide, _TOP + row * high, wide, high, row + first, expert, got / _mean(loads))
        for row, loads in enumerate(tokens)
        for expert, got in enumerate(loads)
    )
    marked = sorted({0, layers - 1})
    names = "".join(
        f'<text x="{_LEFT - 8}" y="{_TOP + (row + 0.5) * high + 4:.1f}" text-anchor="end">layer {row + first}</text>'
        for row in marked
    )
    height = _TOP + layers * high + 8
    return (
        '<h2>Experts</h2><figure class="chart wide">'
        f"<figcaption><h3>Tokens per expert in step {step:,}</h3></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="Load of every expert of every layer">'
        f'<text x="{_LEFT}" y="12">expert 0</text><text x="{_WIDTH}" y="12" text-anchor="end">expert {count - 1}</text>'
        f'{names}{cells}</svg><p class="note foot">{escape(_note(tokens) + _dropped(recorded[-1]))}</p></figure>'
    )


def _cell(x: float, y: float, wide: float, high: float, layer: int, expert: int, load: float) -> str:
    """A pale cell has fewer tokens than the mean, a full one at least twice as many."""
    shade = min(1.0, load / 2)
    tip = f"layer {layer}, expert {expert}: {load:.2f} × the mean"
    style = 'class="kind-gradients" fill="currentColor"' if load == 0 else 'class="kind-parameters" fill="currentColor"'
    opacity = 1.0 if load == 0 else max(0.04, shade)
    size = f'width="{max(wide - 0.5, 0.5):.2f}" height="{max(high - 0.5, 0.5):.2f}"'
    return f'<rect {style} x="{x:.2f}" y="{y:.2f}" {size} fill-opacity="{opacity:.2f}"><title>{tip}</title></rect>'


def _mean(loads: Sequence[int]) -> float:
    return max(sum(loads) / len(loads), 1e-9)


def _note(tokens: Sequence[Sequence[int]]) -> str:
    most = max(max(loads) / _mean(loads) for loads in tokens)
    idle = sum(got == 0 for loads in tokens for got in loads)
    unused = "every expert got tokens" if not idle else f"{idle:,} experts got none (orange)"
    return f"The darker, the more tokens: full colour is twice the mean. The most loaded got {most:.1f} × it; {unused}."


def _dropped(event: dict[str, Any]) -> str:
    """What experts.capacity left out, where it is set."""
    if (dropped := event.get("dropped")) is None:
        return ""
    tokens, first = event["tokens"], event["first_layer"]
    shares = [one / max(sum(loads), 1) for one, loads in zip(dropped, tokens, strict=True)]
    most = max(range(len(shares)), key=shares.__getitem__)
    share = sum(dropped) / max(sum(map(sum, tokens)), 1)
    return f" {share:.1%} of them were dropped for an expert, most in layer {most + first} ({shares[most]:.1%})."
