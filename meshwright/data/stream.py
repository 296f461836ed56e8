"""The global stream: sample i from (seed, sources, weights, i) alone, whoever reads it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.data.blend import Blend
from meshwright.data.hashing import mix
from meshwright.data.order import window_of
from meshwright.data.samples import Sample, Windows
from meshwright.data.stages import PACK, stage

GROUP = 64
"""Samples of like length that follow each other where windows are sorted by length."""


@dataclass(frozen=True)
class Stream:
    """An endless shuffled stream over the windows of one or several parts, every part in epochs of its own."""

    parts: Sequence[Windows]
    seed: int
    blend: Blend | None = None
    """Whose turn each sample is; None with a single part."""
    group: int = 1
    """So many windows that lie together come together."""

    @property
    def sequence_length(self) -> int:
        """Places in every sample."""
        return self.parts[0].sequence_length

    def place(self, sample: int) -> tuple[int, int]:
        """The part and the window that a sample reads."""
        if self.blend is None:
            return 0, window_of(sample, len(self.parts[0]), self.seed, self.group)
        part, number = self.blend.place(sample)
        return part, window_of(number, len(self.parts[part]), mix(part, key=self.seed), self.group)

    def read(self, sample: int) -> Sample:
        """The sample itself."""
        with stage(PACK):
            part, window = self.place(sample)
            found = self.parts[part].read(window)
        # What is random about a picture depends on the seed and the sample's number, in which the epoch is.
        return found if found.media is None else found.with_media(found.media.keyed(mix(sample, key=mix(self.seed))))

    def facts_of(self, samples: Iterable[int]) -> tuple[int, int]:
        """Labels of some samples that count in the loss, and their tokens, without reading them."""
        if all(part.uniform for part in self.parts):
            return (sum(1 for _ in samples) * self.sequence_length,) * 2
        places = [self.place(sample) for sample in samples]
        valid = sum(self.parts[part].count_valid(window) for part, window in places)
        return valid, sum(self.parts[part].length(window) for part, window in places)

    def epochs(self, position: int) -> tuple[float, ...]:
        """How often each part was gone through when this many samples were read."""
        given = (position,) if self.blend is None else self.blend.given(position)
        return tuple(samples / len(part) for samples, part in zip(given, self.parts, strict=True))
