"""The first conversations that a run trains on, with what of them counts in the loss: written once, for its report."""

import json
from pathlib import Path
from typing import NamedTuple

from meshwright.reading import Unfit, read_object

LOSS_TEXT = "loss_text.json"


class Shown(NamedTuple):
    """A conversation: its tokens, those that count in the loss, and its text in parts that count or do not."""

    tokens: int
    loss_tokens: int
    parts: list[tuple[str, bool]]


def loss_text_file(shown: list[Shown]) -> str:
    """The text of the file."""
    return json.dumps({"documents": [one._asdict() for one in shown]}, indent=1, ensure_ascii=False) + "\n"


def read_loss_text(run: Path) -> list[Shown]:
    """What a run folder's file says; nothing if there is none, or none that this wrote."""
    try:
        documents = read_object(run / LOSS_TEXT).get("documents")
        return [Shown(one["tokens"], one["loss_tokens"], _parts(one["parts"])) for one in documents or ()]
    except (FileNotFoundError, Unfit, TypeError, KeyError, ValueError):
        return []


def _parts(value: list[list[object]]) -> list[tuple[str, bool]]:
    return [(str(text), counts is True) for text, counts in value]
