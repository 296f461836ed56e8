"""Prepared data, wherever it came from."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.data.chat import ChatTemplate
from meshwright.data.store import TokenStore
from meshwright.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from meshwright.data.made import Slots
    from meshwright.data.media.index import MediaIndex
    from meshwright.data.samples import Windows
    from meshwright.data.streaming import Flow


@dataclass(frozen=True)
class Corpus:
    """Prepared data: both splits, the tokenizer that made them and their folder (neither for synthetic tokens)."""

    tokenizer: Tokenizer | None
    train: TokenStore
    validation: TokenStore
    folder: Path | None
    source_bounds: tuple[int, ...] = ()
    """Where each of data.sources begins in the training tokens, and where the last ends; empty when there is one."""

    notes: tuple[str, ...] = ()
    """What of the sources was not taken, a sentence each."""

    flow: "Flow | None" = None
    """Where training is read from when nothing was prepared; there are no training tokens then."""

    chat: ChatTemplate | None = None
    """What wrote the conversations, where that is known."""

    train_items: "MediaIndex | None" = None
    """Where the pictures, film and sound of the training samples are; None of text alone."""

    validation_items: "MediaIndex | None" = None
    """The same of the validation samples."""

    noise: "Slots | None" = None
    """Items of noise that synthetic tokens get, for a model that reads pictures or sound."""

    windows: "tuple[Windows, Windows] | None" = None
    """Sequences that are made when they are read, to train on and held out, instead of tokens."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """`source_bounds`, or the whole as one source."""
        return self.source_bounds or (0, len(self.train))
