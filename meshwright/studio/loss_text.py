"""The part of a report that shows which tokens of a run's conversations count in the loss."""

from html import escape
from pathlib import Path

from meshwright.runs.loss_text import Shown, read_loss_text

_MOST = 8
_LONGEST = 20_000


def loss_text_section(run: Path) -> str:
    """The first conversations of a run, what counts in the loss marked; empty if every token counts."""
    shown = read_loss_text(run)[:_MOST]
    if not shown:
        return ""
    note = "The first conversations of the training data; marked text counts in the loss."
    parts = "".join(f'<div class="sample"><h3>{_head(one)}</h3><pre>{_text(one)}</pre></div>' for one in shown)
    return f'<h2>What counts in the loss</h2><p class="note above">{note}</p>{parts}'


def _head(one: Shown) -> str:
    return escape(f"{one.loss_tokens} of {one.tokens} tokens")


def _text(one: Shown) -> str:
    left, found = _LONGEST, []
    for text, counts in one.parts:
        shown = escape(text[:left])
        found.append(f'<mark class="counts">{shown}</mark>' if counts else shown)
        left -= len(text)
        if left <= 0:
            return "".join(found) + " …"
    return "".join(found)
