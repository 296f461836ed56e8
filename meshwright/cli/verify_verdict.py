"""What `meshwright verify` prints of a verdict: the largest error of every kind, and the first difference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.verify import Comparison, Verdict


def as_row(row: Comparison) -> dict[str, Any]:
    """A comparison as printed with --json."""
    error = row.error if math.isfinite(row.error) else None
    seen = {"error": error, "bound": row.bound, "ok": row.ok, "note": row.note}
    return {"format": row.format or None, "kind": row.kind, "name": row.name, **seen}


def print_verdict(console: Console, verdict: Verdict, equal: str, nothing_compared: str | None = None) -> None:
    """Print the largest error of every kind as a table, then one sentence: equal (or that there was nothing to
    compare), or where it first differs."""
    from rich.table import Table

    from meshwright.verify import worst

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("compared", "number", "worst error", "bound", "where", ""):
        table.add_column(column, overflow="fold")
    for form, kind in dict.fromkeys((row.format, row.kind) for row in verdict.rows):
        rows = [row for row in verdict.rows if (row.format, row.kind) == (form, kind)]
        top = worst(rows)
        mark = {True: "[green]equal[/]", False: "[red]not equal[/]", None: "shown"}[top.ok]
        bound = "–" if top.bound is None else f"{top.bound:.0e}"
        table.add_row(f"{kind} in {form}" if form else kind, str(len(rows)), f"{top.error:.1e}", bound, top.name, mark)
        if top.ok is not None and (unjudged := [row.name for row in rows if row.ok is None]):
            names = ", ".join(unjudged[:3]) + (f" and {len(unjudged) - 3} more" if len(unjudged) > 3 else "")
            table.add_row("", str(len(unjudged)), "", "–", f"of these {names}: no gradient to step by", "not judged")
    console.print(table)
    say(console, _sentence(verdict, equal, nothing_compared))


def _sentence(verdict: Verdict, equal: str, nothing_compared: str | None) -> str:
    first = verdict.first_wrong
    if first is None and nothing_compared is not None:
        return f"{nothing_compared} ({verdict.seconds:.1f} s)"
    if first is None:
        forms = ", ".join(dict.fromkeys(row.format for row in verdict.rows if row.format))
        within = f", in {forms} as exactly as the format allows" if forms else ""
        return f"{equal}{within} ({verdict.seconds:.1f} s)"
    if first.kind == "leak":
        return f"wrong: {first.note}"
    return f"not equal: first difference is the {where(first)}"


def where(row: Comparison) -> str:
    """What a comparison compared, and how far off it is."""
    return f"{row.kind} of {row.name}{f' in {row.format}' if row.format else ''}, off by {row.error:.1e}" + (
        f" ({row.note})" if row.note else ""
    )


def say(console: Console, text: str) -> None:
    """Print a line of text without markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
