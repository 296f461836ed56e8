"""Windows of the tokens, each a sample with its labels and where documents lie in it. S = sequence length."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from meshwright.data.store import Int64Array, TokenStore

IGNORE = -100
"""The label of a place that counts for nothing in the loss."""


@dataclass(frozen=True)
class Sample:
    """One sequence; positions only where documents are masked from each other, and then 0 where each begins."""

    tokens_S: Int64Array
    labels_S: Int64Array
    positions_S: Int64Array | None
    length: int
    """Places before the padding."""

    @property
    def document_count(self) -> int:
        """Documents in the sequence, the padding as one; 1 where they are not masked from each other."""
        return 1 if self.positions_S is None else int((self.positions_S == 0).sum())


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
        """Labels of a window that count in the loss, without reading its tokens."""

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
        # A document that begins before the window counts as beginning with it.
        starts = np.concatenate(([0], self.store.starts_between(start + 1, start + length + 1) - start))
        labels = labels.copy()
        labels[starts[1:] - 1] = IGNORE
        return Sample(tokens[:-1], labels, positions_from(starts, length), length)

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


def positions_from(starts: Int64Array, length: int) -> Int64Array:
    """Positions within documents that begin at the given places, the first at 0."""
    positions = np.arange(length, dtype=np.int64)
    for start, stop in pairwise([*starts.tolist()[1:], length]):
        positions[start:stop] -= start
    return positions
