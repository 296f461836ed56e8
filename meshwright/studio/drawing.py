"""A prediction's bars as one self-contained SVG file that any program can show."""

import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.studio.bars import TIME_TINTS, TINTS, WIDTH, Bars, draw_memory, draw_step
from meshwright.studio.files import write_page
from meshwright.studio.page import asset

if TYPE_CHECKING:
    from meshwright.plan import Prediction

_LEFT, _ROW = 64, 20
_LETTER = 6.4
"""Approximate width of a letter in pixels, for placing the legend."""


def write_plan_svg(prediction: "Prediction", out: Path) -> Path:
    """Write the memory of each stage and the time of a step as one picture, and return its path."""
    return write_page(out, _svg(prediction), "--svg")


def _svg(prediction: "Prediction") -> str:
    parts, y = [], 0.0
    for bars in (draw_memory(prediction), draw_step(prediction)):
        part, height = _part(bars, y)
        parts.append(part)
        y += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img" '
        f'aria-label="Predicted memory and time"><style>{_style()}</style>'
        f'<rect width="{WIDTH}" height="{y:.0f}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _part(bars: Bars, top: float) -> tuple[str, float]:
    drawn = [f'<text class="title" x="{_LEFT}" y="{top + 24:.0f}">{escape(bars.title)}</text>']
    x, y = float(_LEFT), top + 44
    for name, tint in bars.tints.items():
        width = 30 + _LETTER * len(name)
        if x + width > WIDTH:
            x, y = float(_LEFT), y + _ROW
        drawn.append(f'<rect class="{tint}" x="{x:.1f}" y="{y - 9:.0f}" width="10" height="10"/>')
        drawn.append(f'<text x="{x + 15:.1f}" y="{y:.0f}">{escape(name)}</text>')
        x += width
    y += 14
    drawn.append(f'<g transform="translate(0 {y:.0f})">{bars.body}</g>')
    return "".join(drawn), y + bars.height - top


def _style() -> str:
    """The page's light colours, by value: programs other than browsers do not support CSS variables."""
    light = asset("base.css").split("@media")[0] + asset("pictures.css").split("@media")[0]
    colours = dict(re.findall(r"--((?:mem|time)-\d+|red|soft):(#\w+)", light))
    names = [f"{kind}-{tint}" for kind, most in (("mem", TINTS), ("time", TIME_TINTS)) for tint in range(most)]
    tints = "".join(f".{name}{{fill:{colours[name]}}}" for name in names)
    return (
        f"text{{font:11.5px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:{colours['soft']}}}"
        f".title{{font-size:15px;font-weight:650}}.limit{{stroke:{colours['red']};stroke-width:2;stroke-dasharray:5 3}}"
        f".total{{paint-order:stroke;stroke:#fff;stroke-width:4px}}{tints}"
    )
