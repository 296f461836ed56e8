"""How long the conversations or pairs of a corpus are, and how many of them a sequence does not hold."""

from dataclasses import dataclass

import numpy as np

from meshwright.data.corpus import Corpus
from meshwright.data.packing import document_starts
from meshwright.job.data import Data


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of what stays together: a conversation, or both answers of a pair."""

    what: str
    count: int
    half: int
    """Half of them are at most so long."""
    ninety: int
    ninety_nine: int
    longest: int
    too_long: int
    """Longer than a sequence: conversations are cut, pairs are left out."""

    def sentence(self, sequence_length: int) -> str:
        """All of it in words."""
        cut = "left out" if self.what == "pairs" else "cut"
        return (
            f"lengths: half of {self.count:,} {self.what} have at most {self.half:,} tokens, 90% {self.ninety:,}, 99% "
            f"{self.ninety_nine:,}, the longest {self.longest:,}; {self.too_long:,} ({self.too_long / self.count:.1%}) "
            f"are longer than batch.sequence_length = {sequence_length} and are {cut}"
        )


def lengths_of(corpus: Corpus, data: Data, sequence_length: int) -> Lengths | None:
    """The lengths of a corpus of conversations or pairs; None of plain text."""
    if data.format == "text" or corpus.folder is None:
        return None
    pairs = data.format == "preferences"
    starts = document_starts(corpus.train, 0, len(corpus.train))[:: 2 if pairs else 1]
    lengths = np.diff(np.append(starts, len(corpus.train)))
    half, ninety, ninety_nine = np.percentile(lengths, (50, 90, 99), method="higher").tolist()
    too_long = int((lengths > sequence_length).sum())
    return Lengths(
        "pairs" if pairs else data.format, len(starts), half, ninety, ninety_nine, int(lengths.max()), too_long
    )
