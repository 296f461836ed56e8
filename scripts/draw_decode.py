"""The picture of docs/multimodal.md: pictures and films decoded by a GPU's engines and by 16 CPU cores.

    python scripts/draw_decode.py

Every number is from benchmarks/results/2026-11-17-decode-h200.json (`benchmarks/decode_h200.py` on one H200).
"""

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-17-decode-h200.json"
OUT = ROOT / "docs" / "images" / "decode.svg"
INK, QUIET, LINE, CPU, GPU = "#1c2733", "#5b6b7b", "#d8dee5", "#9aa7b4", "#2f8f5b"
WIDTH, HEIGHT, PANEL, LEFT = 810, 236, 390, 112
BARS = {
    "pictures, CPU": ("JPEG, 16 cores", CPU),
    "pictures, NVJPEG": ("JPEG, NVJPEG", GPU),
    "film, CPU": ("film, 16 cores", CPU),
    "film, NVDEC": ("film, NVDEC", GPU),
}
PANELS = {
    "items_per_s": ("items per second", "of 1280 × 720; of a film 8 of 300 frames"),
    "host_cpu_s_per_1000": ("host CPU seconds per 1,000 items", "what is taken from everything else"),
}


def main() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="system-ui, '
        f'sans-serif" aria-label="{escape(_in_words(found))}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="#ffffff"/>',
    ]
    for place, field in enumerate(PANELS):
        shapes.append(f'<g transform="translate({10 + place * (PANEL + 10)} 10)">{_panel(found, field)}</g>')
    OUT.write_text("\n".join([*shapes, "</svg>"]) + "\n", encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size / 1e3:.0f} kB")


def _in_words(found: dict[str, Any]) -> str:
    each = (
        f"{label}: {found[name]['items_per_s']:,.0f} items per second, {found[name]['host_cpu_s_per_1000']:.1f} CPU "
        "seconds per thousand"
        for name, (label, _) in BARS.items()
    )
    return "; ".join(each)


def _panel(found: dict[str, Any], field: str) -> str:
    title, below = PANELS[field]
    shapes = [
        f'<rect width="{PANEL}" height="{HEIGHT - 20}" rx="10" fill="#f6f8fa" stroke="{LINE}"/>',
        _text(16, 30, title, 16, INK, "600"),
        _text(16, 50, below, 12, QUIET),
    ]
    most = max(found[name][field] for name in BARS)
    for place, (name, (label, colour)) in enumerate(BARS.items()):
        value, y = found[name][field], 66 + 36 * place
        wide = max(1.0, (PANEL - LEFT - 76) * value / most)
        shapes += [
            _text(16, y + 18, label, 13, INK),
            f'<rect x="{LEFT}" y="{y}" width="{wide:.1f}" height="26" rx="3" fill="{colour}"/>',
            _text(LEFT + wide + 6, y + 18, f"{value:,.0f}" if value >= 100 else f"{value:.1f}", 13, INK, "600"),
        ]
    return "".join(shapes)


def _text(x: float, y: float, words: str, size: int, colour: str, weight: str = "400") -> str:
    look = f'font-size="{size}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
