"""The mesh on the machines: nodes of GPUs, once per axis, coloured by the position along it."""

from html import escape
from math import prod

_MOST_NODES = 16
_TINTS = 12
_CELL, _GAP, _PANEL = 16, 2, 14
_WORDS = {
    "pp": "pipeline stages (pp)",
    "dp_replicate": "replicas (dp_replicate)",
    "dp_shard": "shards (dp_shard)",
    "cp": "slices of a sequence (cp)",
    "tp": "shards of a layer (tp)",
}


def mesh(axes: dict[str, int], gpus_per_node: int) -> str:
    """A panel for every axis larger than 1; `axes` are sizes by name, outermost first, as ranks are numbered."""
    ranks = prod(axes.values())
    nodes = -(-ranks // gpus_per_node)
    shown = min(nodes, _MOST_NODES)
    used = [name for name, size in axes.items() if size > 1]
    panels = "".join(_panel(name, axes, gpus_per_node, shown) for name in used)
    note = "Every row is a node, every square a GPU; GPUs of one colour have the same position along the axis."
    if max(axes.values()) > _TINTS:
        note += f" Colours repeat after {_TINTS} positions."
    if nodes > shown:
        note += f" Only the first {shown} of {nodes} nodes are shown."
    if not used:
        note = "One GPU: there is nothing to lay out."
    return (
        '<figure class="picture mesh"><figcaption><h3>Mesh</h3></figcaption>'
        f'<div class="panels">{panels}</div><p class="note foot">{note}</p></figure>'
    )


def _panel(name: str, axes: dict[str, int], gpus_per_node: int, nodes: int) -> str:
    sizes = list(axes.items())
    place = [axis for axis, _ in sizes].index(name)
    size, stride = axes[name], prod(size for _, size in sizes[place + 1 :])
    columns = min(gpus_per_node, prod(axes.values()))
    cells = []
    for rank in range(min(prod(axes.values()), nodes * gpus_per_node)):
        at = rank // stride % size
        x, y = rank % gpus_per_node * (_CELL + _GAP), rank // gpus_per_node * (_CELL + _PANEL // 3)
        title = f"<title>node {rank // gpus_per_node}, rank {rank}: {name} {at}</title>"
        box = f'x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="2"'
        cells.append(f'<rect class="tint-{at % _TINTS}" {box}>{title}</rect>')
    width, height = columns * (_CELL + _GAP), nodes * (_CELL + _PANEL // 3)
    words = f"{_WORDS[name]}: {size}"
    return (
        f'<div class="panel"><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="GPUs by {escape(words)}">{"".join(cells)}</svg><p class="note">{escape(words)}</p></div>'
    )
