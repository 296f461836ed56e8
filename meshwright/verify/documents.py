"""The text of a check: synthetic documents so unequal that no two ranks count the same number of tokens."""

import numpy as np
from numpy.typing import NDArray

from meshwright.data import Corpus
from meshwright.job import Job

TOKENS = 4096
LONGEST = 40
HELD_OUT = 3
"""Held-out sequences: an odd number, so that the last batch of an evaluation is short."""


class UnequalDocuments:
    """A short token store in memory; document lengths run from 2 to LONGEST, short and long ones in clusters.

    A document's last token has no label and its first sees nothing but itself, so lengths from 3 on are what exercises
    attention; every sequence has some.
    """

    def __init__(self, vocab_size: int, count: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._tokens = generator.integers(0, vocab_size, count)
        starts = [0]
        while starts[-1] < count:
            # Neighbours are alike, so that one sequence has a boundary every few tokens and the next has none.
            longest = int(generator.choice((4, 10, LONGEST)))
            lengths = generator.integers(longest // 2, longest + 1, size=LONGEST // longest)
            starts += (starts[-1] + lengths.cumsum()).tolist()
        self._starts = np.array([start for start in starts if start < count], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens from start up to stop."""
        return self._tokens[start:stop].astype(np.int64)

    def starts_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents start, start included and stop not."""
        first, last = np.searchsorted(self._starts, (start, stop))
        return self._starts[first:last]

    def targets(self, start: int, stop: int) -> None:
        """All of them."""


def unequal_corpus(job: Job) -> Corpus:
    """A corpus of such documents at the job's sizes, training and held-out text apart."""
    vocabulary, held_out = job.model.vocab_size, HELD_OUT * job.batch.sequence_length + 1
    train, validation = (UnequalDocuments(vocabulary, count, seed) for seed, count in enumerate((TOKENS, held_out)))
    return Corpus(None, train, validation, None)
