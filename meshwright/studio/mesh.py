"""The mesh on the machines: nodes of GPUs, once per axis, coloured by the position along it."""

from collections.abc import Sequence
from html import escape
from itertools import product
from math import prod

_MOST_NODES = 16
_MOST_STAGES = 32
_TINTS = 12
_CELL, _GAP, _PANEL, _LEFT = 18, 2, 14, 30
_WORDS = {
    "pp": "pipeline stages (pp)",
    "dp_replicate": "replicas (dp_replicate)",
    "dp_shard": "shards (dp_shard)",
    "cp": "slices of a sequence (cp)",
    "tp": "shards of a layer (tp)",
    "ep": "ranks with different experts (ep)",
}


def mesh(axes: dict[str, int], gpus_per_node: int, stages: Sequence[str] = (), ep: int = 1) -> str:
    """A panel for every axis larger than 1; `axes` are sizes by name, outermost first, as ranks are numbered.

    `stages` says what each pipeline rank holds. Experts are distributed over `ep` of the ranks that have different
    tokens, whatever axes these are on.
    """
    ranks = prod(axes.values())
    nodes = -(-ranks // gpus_per_node)
    used = [name for name, size in axes.items() if size > 1]
    panels = "".join(
        _panel(name, axes[name], _places(name, axes), gpus_per_node, stages if name == "pp" else ()) for name in used
    )
    if ep > 1:
        panels += _panel("ep", ep, _expert_places(axes, ep), gpus_per_node, ())
    note = "Every row is a node, every square a GPU, numbered and coloured by its position along the axis."
    if max(axes.values()) > _TINTS:
        note += f" Colours repeat after {_TINTS} positions."
    if nodes > _MOST_NODES:
        note += f" {_MOST_NODES} of {nodes} nodes are shown, those first that add a position."
    if not used:
        note = "One GPU: there is nothing to lay out."
    return (
        '<figure class="picture mesh"><figcaption><h3>Mesh</h3></figcaption>'
        f'<div class="panels">{panels}</div><p class="note foot">{note}</p></figure>'
    )


def _places(name: str, axes: dict[str, int]) -> list[int]:
    """The position of every rank along an axis."""
    inner = prod(list(axes.values())[list(axes).index(name) + 1 :])
    return [rank // inner % axes[name] for rank in range(prod(axes.values()))]


def _expert_places(axes: dict[str, int], ep: int) -> list[int]:
    """Which of the shares of experts every rank has: neighbours in a replica have different ones."""
    sizes = {"dp_shard": 1, "cp": 1, "tp": 1, **axes}
    found = []
    for at in product(*(range(size) for size in axes.values())):
        place = {"dp_shard": 0, "cp": 0, "tp": 0, **dict(zip(axes, at, strict=True))}
        found.append(((place["dp_shard"] * sizes["cp"] + place["cp"]) * sizes["tp"] + place["tp"]) % ep)
    return found


def _panel(name: str, size: int, places: Sequence[int], gpus_per_node: int, stages: Sequence[str]) -> str:
    ranks = len(places)
    held = [places[first : first + gpus_per_node] for first in range(0, ranks, gpus_per_node)]
    rows = _shown(held)
    drawn = [_row(name, node, held[node], gpus_per_node, row) for row, node in enumerate(rows)]
    width = _LEFT + min(gpus_per_node, ranks) * (_CELL + _GAP)
    height = len(rows) * (_CELL + _PANEL // 3)
    words = f"{_WORDS[name]}: {size}"
    return (
        f'<div class="panel"><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="GPUs by {escape(words)}">{"".join(drawn)}</svg><p class="note">{escape(words)}</p>'
        f"{_stages(stages)}</div>"
    )


def _shown(held: Sequence[Sequence[int]]) -> list[int]:
    """The nodes that are drawn: if there are too many, first those on which a position appears that is not yet there.

    Otherwise the first nodes of a long pipeline would all show its first stage.
    """
    seen: set[int] = set()
    new = []
    for node, places in enumerate(held):
        if not seen.issuperset(places):
            new.append(node)
            seen.update(places)
    new = new[:: -(-len(new) // _MOST_NODES)]
    rest = [node for node in range(len(held)) if node not in set(new)]
    return sorted(new + rest[: _MOST_NODES - len(new)])


def _row(name: str, node: int, places: Sequence[int], gpus_per_node: int, row: int) -> str:
    y = row * (_CELL + _PANEL // 3)
    parts = [f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{y + _CELL - 5}">{node}</text>']
    for index, at in enumerate(places):
        x = _LEFT + index * (_CELL + _GAP)
        title = f"<title>node {node}, rank {node * gpus_per_node + index}: {name} {at}</title>"
        box = f'x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="2"'
        parts.append(f'<rect class="tint-{at % _TINTS}" {box}>{title}</rect>')
        parts.append(f'<text class="on" text-anchor="middle" x="{x + _CELL / 2:.0f}" y="{y + _CELL - 5}">{at}</text>')
    return "".join(parts)


def _stages(stages: Sequence[str]) -> str:
    if not stages:
        return ""
    lines = "".join(
        f'<li><i class="swatch tint-{rank % _TINTS}"></i>{rank}: {_unbroken(words)}</li>'
        for rank, words in enumerate(stages[:_MOST_STAGES])
    )
    more = f"<li>and {len(stages) - _MOST_STAGES} more</li>" if len(stages) > _MOST_STAGES else ""
    return f'<ul class="stages">{lines}{more}</ul>'


def _unbroken(words: str) -> str:
    return "; ".join(f"<span>{escape(part)}</span>" for part in words.split("; "))
