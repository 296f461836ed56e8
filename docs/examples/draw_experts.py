"""Draws how tokens travel to experts: two ranks, four experts, two experts for every token.

python docs/examples/draw_experts.py dispatch.svg

The rows are ordered by the code that orders them in training; only the choices of the router are made up.
"""

import sys
from itertools import accumulate
from pathlib import Path

import torch

from meshwright.model.moe import SortedByExpert

CHOSEN = ([[0, 2], [1, 2], [0, 3], [2, 1]], [[3, 0], [2, 3], [1, 3], [3, 2]])
"""The experts of the four tokens of each rank, best first."""
EXPERTS, RANKS = 4, 2
COLOURS = ("#2f6fb2", "#7fb2e5", "#c77d1e", "#edbb74")
"""Of the experts: two shades of one colour are on one rank."""
INK, QUIET, LINE = "#1c2733", "#5b6b7b", "#b9c3cd"
CELL, GAP, COLUMNS, HALF, TOP = 26, 4, (30, 180, 375, 570), 290, 50
WIDTH, HEIGHT = 740, TOP + HALF + 340


def main(out: Path) -> None:
    orders = [_rows(rank) for rank in range(RANKS)]
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="system-ui, '
        'sans-serif" aria-label="Tokens of two ranks are sorted by expert, sent to the rank of their expert, and '
        'sorted by expert there">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    heads = ("tokens and experts", "sorted by expert", "after the all-to-all", "each expert's own rows")
    shapes += [_text(x, 24, words, INK, 13) for x, words in zip(COLUMNS, heads, strict=True)]
    shapes.append(_text(COLUMNS[3], 42, "results return the same way", QUIET, 11))
    places = [_sent(rank, rows) for rank, rows in enumerate(orders)]
    for rank, rows in enumerate(orders):
        shapes += [_text(COLUMNS[0], _y(rank, -1) + 14, f"rank {rank}", INK, 13), *_tokens(rank)]
        shapes += [_cell(COLUMNS[1], _y(rank, at), *row) for at, row in enumerate(rows)]
    for place in range(RANKS):
        arrived = [row for rank in range(RANKS) for row in places[rank][place]]
        shapes += [_cell(COLUMNS[2], _y(place, at), *row) for at, row in enumerate(arrived)]
        by_expert = sorted(arrived, key=lambda row: row[2])  # stable: rows of one expert keep the order of their ranks
        shapes += [_cell(COLUMNS[3], _y(place, at), *row) for at, row in enumerate(by_expert)]
        shapes += _arrows(place, places)
        shapes += _braces(place, [row[2] for row in by_expert])
    out.write_text("\n".join([*shapes, "</svg>"]) + "\n", encoding="utf-8")


def _rows(rank: int) -> list[tuple[int, int, int]]:
    """The rows of a rank sorted by expert: (rank, token, expert)."""
    chosen = torch.tensor(CHOSEN[rank])
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    tokens = SortedByExpert(chosen, counts).rows(torch.arange(len(chosen)).unsqueeze(1)).flatten().tolist()
    experts = torch.repeat_interleave(torch.arange(EXPERTS), counts).tolist()
    return [(rank, token, expert) for token, expert in zip(tokens, experts, strict=True)]


def _sent(rank: int, rows: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """The rows that a rank sends to each rank."""
    return [[row for row in rows if row[2] * RANKS // EXPERTS == place] for place in range(RANKS)]


def _tokens(rank: int) -> list[str]:
    shapes = []
    for token, chosen in enumerate(CHOSEN[rank]):
        y = _y(rank, 2 * token) + CELL // 2
        shapes += [_text(COLUMNS[0], y + 18, f"token {token}", QUIET, 11)]
        shapes += [_cell(COLUMNS[0] + 52 + i * (CELL + GAP), y, rank, token, expert) for i, expert in enumerate(chosen)]
    return shapes


def _arrows(place: int, places: list[list[list[tuple[int, int, int]]]]) -> list[str]:
    """One arrow for every pair of ranks, as wide as it has rows."""
    shapes, into = [], [0, *accumulate(len(places[rank][place]) for rank in range(RANKS))]
    for rank in range(RANKS):
        before, count = sum(len(rows) for rows in places[rank][:place]), len(places[rank][place])
        start = _y(rank, before + count / 2) - GAP / 2
        end = _y(place, into[rank] + count / 2) - GAP / 2
        left, right = COLUMNS[1] + 2 * CELL + 8, COLUMNS[2] - 8
        bend = f"M{left} {start:.1f}C{left + 60} {start:.1f} {right - 60} {end:.1f} {right} {end:.1f}"
        shapes.append(
            f'<path d="{bend}" fill="none" stroke="{LINE}" stroke-width="{4 * count}" stroke-opacity="0.55"/>'
        )
        shapes.append(_text(left + 4, start + 4, f"{count} rows", QUIET, 11))
    return shapes


def _braces(place: int, experts: list[int]) -> list[str]:
    shapes = []
    for expert in sorted(set(experts)):
        first, count = experts.index(expert), experts.count(expert)
        x, top, bottom = COLUMNS[3] + 2 * CELL + 8, _y(place, first), _y(place, first + count) - GAP
        shapes.append(f'<path d="M{x} {top}h6v{bottom - top}h-6" fill="none" stroke="{INK}"/>')
        shapes.append(_text(x + 14, (top + bottom) / 2 + 4, f"expert {expert}", INK, 12))
    return shapes


def _cell(x: float, y: float, rank: int, token: int, expert: int) -> str:
    """A row: coloured by its expert, named by its rank and token."""
    wide = 2 * CELL if x >= COLUMNS[1] else CELL
    words = f"{rank}.{token}" if wide > CELL else str(expert)
    ink = "#ffffff" if expert % 2 == 0 else INK
    return (
        f'<rect x="{x}" y="{y:.1f}" width="{wide}" height="{CELL}" rx="3" fill="{COLOURS[expert]}"/>'
        f'<text x="{x + wide / 2}" y="{y + 17:.1f}" font-size="12" fill="{ink}" text-anchor="middle">{words}</text>'
    )


def _y(rank: int, row: float) -> float:
    return TOP + 26 + rank * HALF + row * (CELL + GAP)


def _text(x: float, y: float, words: str, colour: str, size: int) -> str:
    return f'<text x="{x}" y="{y:.1f}" font-size="{size}" fill="{colour}">{words}</text>'


if __name__ == "__main__":
    main(Path(sys.argv[1]))
