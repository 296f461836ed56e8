"""Sample i: a window of the tokens, its labels, and where documents lie in it. S = sequence length."""

from dataclasses import dataclass

import numpy as np

from meshwright.data.order import window_of
from meshwright.data.store import Int64Array, TokenStore

IGNORE = -100
"""The label of a place that counts for nothing in the loss."""


@dataclass(frozen=True)
class Sample:
    """One sequence; positions and document numbers only where documents are masked from each other."""

    tokens_S: Int64Array
    labels_S: Int64Array
    positions_S: Int64Array | None
    document_ids_S: Int64Array | None


def count_windows(store: TokenStore, sequence_length: int) -> int:
    """How many windows a store holds; the last token of each is only a label."""
    return max(0, len(store) - 1) // sequence_length


def read_sample(store: TokenStore, seed: int, sequence_length: int, index: int, mask_documents: bool) -> Sample:
    """Sample index of the endless shuffled stream: a pure function of seed and index."""
    window = window_of(index, count_windows(store, sequence_length), seed)
    return read_window(store, sequence_length, window, mask_documents)


def count_valid(store: TokenStore, seed: int, sequence_length: int, index: int, mask_documents: bool) -> int:
    """Labels of a sample that count in the loss, without reading its tokens."""
    if not mask_documents:
        return sequence_length
    start = window_of(index, count_windows(store, sequence_length), seed) * sequence_length
    return sequence_length - len(store.starts_between(start + 1, start + sequence_length + 1))


def read_window(store: TokenStore, sequence_length: int, window: int, mask_documents: bool) -> Sample:
    """The window as a sample, in the order of the store."""
    start = window * sequence_length
    tokens = store.read(start, start + sequence_length + 1)
    if not mask_documents:
        return Sample(tokens[:-1], tokens[1:], None, None)
    # A document that begins before the window counts as beginning with it.
    starts = np.concatenate(([0], store.starts_between(start + 1, start + sequence_length + 1) - start))
    labels = tokens[1:].copy()
    labels[starts[1:] - 1] = IGNORE
    places = np.arange(sequence_length, dtype=np.int64)
    document_ids = np.searchsorted(starts, places, side="right") - 1
    return Sample(tokens[:-1], labels, places - starts[document_ids], document_ids)
