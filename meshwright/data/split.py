"""Training and validation: which documents, or which part of each document, are held out."""

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from meshwright.data.hashing import fraction_of
from meshwright.data.sources import Document
from meshwright.data.store import TokenWriter

_KEY = 0x5EED_0F_5417
_FEW_DOCUMENTS = 20


def held_out(ordinal: int, fraction: float) -> bool:
    """Whether the document with this number is one of validation's."""
    return fraction_of(ordinal, _KEY) < fraction


def splits_by_document(documents: Iterable[Document], fraction: float) -> bool:
    """Whether whole documents can be held out: there are at least twenty, and one of them falls to validation.

    Otherwise the end of every document is held out instead. Reads no further than needed to know.
    """
    ordinal = 0
    found = False
    for document in documents:
        if not document.last_piece:
            continue
        found = found or held_out(ordinal, fraction)
        ordinal += 1
        if found and ordinal >= _FEW_DOCUMENTS:
            return True
    return False


def with_end(
    tokens: list[int], targets: list[bool], end_of_text: int, end_counts: bool
) -> tuple[list[int], list[bool]]:
    """A conversation's tokens and what the loss counts of them, behind them the end of text unless they have it."""
    if tokens[-1] == end_of_text:
        return tokens, targets
    return [*tokens, end_of_text], [*targets, end_counts]


class SplitWriter:
    """Writes encoded documents to the training and validation files, each ended by the end of text."""

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[Any],
        end_of_text: int,
        fraction: float,
        *,
        by_document: bool,
        marked: bool = False,
    ) -> None:
        self.train = TokenWriter(folder, "train", dtype, marked=marked)
        self.validation = TokenWriter(folder, "validation", dtype, marked=marked)
        self._end_of_text = end_of_text
        self._fraction = fraction
        self._by_document = by_document
        self._ordinal = 0
        self._current: TokenWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.train.close()
        self.validation.close()

    def add_marked(self, tokens: list[int], targets: list[bool], *, end_counts: bool) -> None:
        """Add a whole document of which the loss counts some tokens, perhaps its end too."""
        writer = self.validation if held_out(self._ordinal, self._fraction) else self.train
        writer.begin_document()
        writer.append(*with_end(tokens, targets, self._end_of_text, end_counts))
        self._ordinal += 1

    def add(self, tokens: list[int], *, last_piece: bool) -> None:
        """Add a document, or the next piece of the one begun."""
        if self._current is None:
            in_validation = self._by_document and held_out(self._ordinal, self._fraction)
            self._current = self.validation if in_validation else self.train
            self._current.begin_document()
        self._current.append(tokens)
        if last_piece:
            if not self._by_document:
                self._hold_out_tail()
            self._current.append([self._end_of_text])
            self._current = None
            self._ordinal += 1

    def finish(self) -> None:
        """Bring both files to the disk."""
        self.train.finish()
        self.validation.finish()

    def _hold_out_tail(self) -> None:
        count = int(self.train.document_length() * self._fraction)
        if count:
            tail = self.train.take_back(count)
            self.validation.begin_document()
            self.validation.append(tail)
            self.validation.append([self._end_of_text])
