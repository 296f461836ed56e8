"""Windows of the tokens, each a sample with its labels and where documents lie in it. S = its length, B = samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.store import Int64Array, TokenStore
from meshwright.job.fields import ItemPlan

IGNORE = -100
"""The label of a place that counts for nothing in the loss."""


class Items(Protocol):
    """Pictures, frames and windows of sound of a sample, decoded when asked for. K slots, T tokens each."""

    @property
    def plan(self) -> ItemPlan:
        """Size, tokens and slots."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the items before they are normalised."""

    @property
    def scale(self) -> tuple[Sequence[float], Sequence[float]] | None:
        """Mean and deviation of the colours; None where items need not be normalised."""

    def places_KT(self) -> Int64Array:
        """The place of every token of every item, -1 in empty slots."""

    def fill(self, items_K: NDArray[Any]) -> list[str]:
        """Decode the items into their slots; the names of those that could not be."""

    def encoded(self, row: int) -> list[Any]:
        """The bytes of the items, for row `row` of a batch, to be decoded elsewhere."""

    def keyed(self, key: int) -> "Items":
        """The same items, with what chance is drawn from."""


@dataclass(frozen=True)
class Sample:
    """One sequence, and where documents begin in it if they are masked from each other."""

    tokens_S: Int64Array
    labels_S: Int64Array
    starts: Int64Array | None
    """Ascending from 0, the padding as a document; None where documents see each other."""
    length: int
    """Places before the padding."""
    pairs: Int64Array | None = None
    """Where each pair of answers in it begins in the tokens of its split, by which a pair is known; its documents are
    the chosen and the rejected answer of each in turn. None where the loss is that of tokens."""
    media: Items | None = None
    """What the placeholders among the tokens stand for."""

    def with_media(self, media: Items) -> "Sample":
        """The sample with pictures, film and sound."""
        return replace(self, media=media)

    @property
    def valid(self) -> int:
        """What the loss is a mean over: labels that count, or pairs."""
        return int(np.count_nonzero(self.labels_S != IGNORE)) if self.pairs is None else len(self.pairs)

    @property
    def document_count(self) -> int:
        """Documents in the sequence, the padding as one; 1 where they are not masked from each other."""
        return 1 if self.starts is None else len(self.starts)

    @property
    def positions_S(self) -> Int64Array | None:
        """The place of every token in its document; None where documents see each other."""
        return None if self.starts is None else positions_and_documents([self.starts], len(self.tokens_S))[0][0]


class Windows(Protocol):
    """Sequences of one length, by number; can be sent to another process."""

    def __len__(self) -> int:
        """Number of windows."""

    @property
    def sequence_length(self) -> int:
        """Places in each."""

    @property
    def uniform(self) -> bool:
        """Whether every label of every window counts."""

    def read(self, window: int) -> Sample:
        """The window as a sample."""

    def count_valid(self, window: int) -> int:
        """Labels of a window that count in the loss (its pairs, if it holds such), without reading its tokens."""

    def length(self, window: int) -> int:
        """Places of a window before the padding."""


@dataclass(frozen=True)
class RunningWindows:
    """Text cut into equal windows wherever they end: nothing is padded, and documents are cut."""

    store: TokenStore
    sequence_length: int
    mask_documents: bool = False
    start: int = 0
    stop: int | None = None
    """The part of the store that is cut; all of it when not given."""

    def __len__(self) -> int:
        stop = len(self.store) if self.stop is None else self.stop
        return max(0, stop - self.start - 1) // self.sequence_length  # the last token of each is only a label

    @property
    def uniform(self) -> bool:
        """Whether every label of every window counts."""
        return not self.mask_documents and self.store.targets(0, 0) is None

    def read(self, window: int) -> Sample:
        """The window as a sample."""
        start, length = self.start + window * self.sequence_length, self.sequence_length
        tokens = self.store.read(start, start + length + 1)
        labels = tokens[1:]
        targets = self.store.targets(start + 1, start + length + 1)
        if targets is not None:
            labels = np.where(targets, labels, IGNORE)
        if not self.mask_documents:
            return Sample(tokens[:-1], labels, None, length)
        return masked_sample(tokens[:-1], labels, self.store.starts_between(start + 1, start + length + 1) - start)

    def count_valid(self, window: int) -> int:
        """Labels of a window that count in the loss."""
        start, length = self.start + window * self.sequence_length, self.sequence_length
        targets = self.store.targets(start + 1, start + length + 1)
        if not self.mask_documents:
            return length if targets is None else int(targets.sum())
        starts = self.store.starts_between(start + 1, start + length + 1)
        if targets is None:
            return length - len(starts)
        return int(targets.sum() - targets[starts - start - 1].sum())

    def length(self, window: int) -> int:
        """Every place: there is no padding."""
        return self.sequence_length


def masked_sample(tokens_S: Int64Array, labels_S: Int64Array, begun: Int64Array) -> Sample:
    """A sequence full of documents, given the places from 1 up to S where one begins: at S, only for its last label.

    A document that begins before the sequence counts as beginning with it.
    """
    labels = labels_S.copy()
    labels[begun - 1] = IGNORE
    starts = np.zeros(len(begun) + 1, np.int64)
    starts[1:] = begun
    if len(begun) and begun[-1] == len(tokens_S):
        starts = starts[:-1]
    return Sample(tokens_S, labels, starts, len(tokens_S))


def positions_and_documents(starts: Sequence[Int64Array], sequence_length: int) -> tuple[Int64Array, Int64Array]:
    """Of some samples (B × S), the place of every token in its document, and the number of that in its sample."""
    size = len(starts) * sequence_length
    first = np.concatenate([own + sample * sequence_length for sample, own in enumerate(starts)])
    lengths = np.diff(first, append=size)
    number = np.concatenate([np.arange(len(own)) for own in starts])
    positions = np.arange(size)
    positions -= np.repeat(first, lengths)
    return positions.reshape(-1, sequence_length), np.repeat(number, lengths).reshape(-1, sequence_length)
