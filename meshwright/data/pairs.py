"""Windows of whole pairs of answers, the chosen one and the rejected one as neighbouring documents."""

import numpy as np

from meshwright.data.packed import PADDING, PackedWindows
from meshwright.data.samples import IGNORE, Sample
from meshwright.errors import UserError


class PairWindows(PackedWindows):
    """Whole pairs in windows of one length; a piece of the index is a pair, and no answer sees another."""

    def read(self, window: int) -> Sample:
        """The window as a sample, its documents the answers, chosen before rejected."""
        starts, lengths = self.pieces(window)
        length = int(lengths.sum())
        tokens = np.full(self.sequence_length, PADDING, np.int64)
        labels = np.full(self.sequence_length, IGNORE, np.int64)
        documents = []
        place = 0
        for start, stop in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
            inner = self.store.starts_between(start + 1, stop)
            if len(inner) != 1:
                raise UserError(
                    f"the prepared pairs are damaged: {len(inner) + 1} documents where a chosen and a rejected answer "
                    f"should be, at token {start}; prepare the folder again"
                )
            for first, last in ((start, int(inner[0])), (int(inner[0]), stop)):
                read, counts = self.store.read(first, last), self.store.targets(first, last)
                end = place + last - first
                tokens[place:end] = read
                labels[place : end - 1] = read[1:] if counts is None else np.where(counts[1:], read[1:], IGNORE)
                documents.append(place)
                place = end
        if length < self.sequence_length:
            documents.append(length)
        return Sample(tokens, labels, np.array(documents, np.int64), length, starts.copy())

    def count_valid(self, window: int) -> int:
        """Pairs of a window."""
        return len(self.pieces(window)[0])
