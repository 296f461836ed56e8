"""A batch of sequences. B = sequences in the batch, S = sequence length."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from meshwright.data.media.carried import CarriedMedia, EncodedMedia, carrier_for, encoded_media
from meshwright.data.samples import IGNORE, Items, Sample, positions_and_documents
from meshwright.data.store import Int64Array
from meshwright.model import Documents, Media


@dataclass(frozen=True)
class Step:
    """What one rank needs of one optimizer step: its samples, and a fact about everyone's."""

    batch: "Batch"
    valid_count: float
    """Labels that count in the loss over the whole step, or pairs, all ranks together; a loss scale divides it."""
    tokens: int
    """Tokens of the whole step, all ranks together and without padding."""
    lost: tuple[str, ...] = ()
    """Items of this rank that could not be decoded, by name; they are empty."""
    waiting: EncodedMedia | None = None
    """Items of the batch that are to be decoded on the device."""

    def pin_memory(self) -> "Step":
        """The step with its batch in page-locked memory."""
        return replace(self, batch=self.batch.pin_memory())


@dataclass(frozen=True)
class Batch:
    """Tokens and labels of some samples, with what is needed to mask documents where that was asked for."""

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor | None
    document_ids_BS: Tensor | None
    sample_ids_B: Tensor
    valid_counts: tuple[int, ...]
    """Valid labels of each sample, or its pairs, counted before any copy to a device so that asking never waits."""
    document_counts: tuple[int, ...]
    """Documents in each sample, counted likewise; ones where documents are not masked."""
    lengths: tuple[int, ...]
    """Places of each sample before its padding."""
    pairs: tuple[Int64Array, ...] | None = None
    """Where the pairs of answers in each sample begin in their split; None where the loss is that of tokens."""
    media: Media | None = None
    """Pictures, frames and sound, for a model that reads them."""

    def __len__(self) -> int:
        return len(self.valid_counts)

    def valid_count(self) -> int:
        """Number of labels that count in the loss, or of pairs."""
        return sum(self.valid_counts)

    def documents(self) -> Documents | None:
        """What attention needs to stay within documents; the bound is a power of two, so it rarely changes."""
        if self.document_ids_BS is None:
            return None
        return Documents(self.document_ids_BS, at_most=1 << (sum(self.document_counts) - 1).bit_length())

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """The batch on a device; from pinned memory the copy runs beside the computation."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The batch in page-locked memory."""
        return self._map(Tensor.pin_memory)

    def split(self, micro_batch: int) -> list[Self]:
        """The batch in order as parts of micro_batch samples; the last one is smaller when they do not divide."""
        if len(self) <= micro_batch:
            return [self]
        return [self.select(slice(start, start + micro_batch)) for start in range(0, len(self), micro_batch)]

    def select(self, rows: slice) -> Self:
        """Some of the samples."""
        return replace(
            self._map(lambda tensor: tensor[rows]),
            valid_counts=self.valid_counts[rows],
            document_counts=self.document_counts[rows],
            lengths=self.lengths[rows],
            pairs=None if self.pairs is None else self.pairs[rows],
        )

    def ahead(self, places: int) -> tuple[Tensor, Tensor]:
        """For every place the token so many places later, and that one's label: none beyond the end of the sequence or
        of the document."""
        labels_BS = self.labels_BS.roll(-places, 1)
        labels_BS[:, -places:] = IGNORE
        if self.document_ids_BS is not None:
            labels_BS = labels_BS.where(self.document_ids_BS == self.document_ids_BS.roll(-places, 1), IGNORE)
        return self.tokens_BS.roll(-places, 1), labels_BS

    def trimmed(self) -> Self:
        """Without the padding that all samples share, down to a half, a quarter or an eighth of their length.

        So few lengths, since compiled code is made anew for each.
        """
        length = self.tokens_BS.shape[1]
        for _ in range(3):
            if length % 2 or length // 2 < max(self.lengths):
                break
            length //= 2
        if length == self.tokens_BS.shape[1]:
            return self
        whole = replace(self, media=None)
        cut = whole._map(lambda tensor: tensor if tensor.dim() == 1 else tensor[:, :length])
        if self.media is None:
            return cut
        places_BKT = self.media.places_BKT  # whoever made them may have put some into the padding
        return replace(cut, media=replace(self.media, places_BKT=places_BKT.where(places_BKT < length, -1)))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(
            self,
            tokens_BS=change(self.tokens_BS),
            labels_BS=change(self.labels_BS),
            positions_BS=None if self.positions_BS is None else change(self.positions_BS),
            document_ids_BS=None if self.document_ids_BS is None else change(self.document_ids_BS),
            sample_ids_B=change(self.sample_ids_B),
            media=None if self.media is None else self.media.map(change),
        )


def stack_samples(samples: Sequence[Sample], sample_ids: Sequence[int]) -> Batch:
    """The samples as a batch, under the numbers given."""
    return stacked(samples, sample_ids)[0]


def stacked(samples: Sequence[Sample], sample_ids: Sequence[int], decode: bool = True) -> tuple[Batch, tuple[str, ...]]:
    """The samples as a batch, and the items in it that could not be decoded."""
    labels_BS = _stack([sample.labels_S for sample in samples])
    media = None if samples[0].media is None or not decode else carrier_for(samples[0].media, len(samples))
    lost: list[str] = []
    for place, sample in enumerate(samples):
        if media is not None and sample.media is not None:
            lost += media.put(place, sample.media)
    starts = [sample.starts for sample in samples if sample.starts is not None]
    positions_BS, document_ids_BS = _documents(starts, labels_BS.shape[1])
    batch = Batch(
        tokens_BS=_stack([sample.tokens_S for sample in samples]),
        labels_BS=labels_BS,
        positions_BS=positions_BS,
        document_ids_BS=document_ids_BS,
        sample_ids_B=torch.tensor(sample_ids, dtype=torch.int64),
        valid_counts=tuple(sample.valid for sample in samples),
        document_counts=tuple(sample.document_count for sample in samples),
        lengths=tuple(sample.length for sample in samples),
        pairs=_pairs_of(sample.pairs for sample in samples),
        media=None if media is None else media.arrived(),
    )
    return batch, tuple(lost)


def _pairs_of(pairs: Iterable[Int64Array | None]) -> tuple[Int64Array, ...] | None:
    found = tuple(own for own in pairs if own is not None)
    return found or None


def _documents(starts: Sequence[Int64Array], sequence_length: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Every place's position in its document and the number of that document; neither where they see each other."""
    if not starts:
        return None, None
    positions_BS, document_ids_BS = positions_and_documents(starts, sequence_length)
    return torch.from_numpy(positions_BS), torch.from_numpy(document_ids_BS)


def _stack(rows: Sequence[Int64Array]) -> Tensor:
    return torch.from_numpy(np.stack(rows))


@dataclass(frozen=True)
class Parcel:
    """A step on its way out of a worker: half as wide and in one piece, since making shared memory is what costs there.

    K = 2: tokens, labels.
    """

    numbers_KBS: Tensor
    starts: tuple[Int64Array, ...]
    """Where documents begin in each sample; none where they see each other."""
    sample_ids: tuple[int, ...]
    valid_counts: tuple[int, ...]
    document_counts: tuple[int, ...]
    lengths: tuple[int, ...]
    valid_count: float
    tokens: int
    pairs: tuple[Int64Array, ...] | None
    media: CarriedMedia | None = None
    lost: tuple[str, ...] = ()
    waiting: EncodedMedia | None = None

    def unpacked(self) -> Step:
        """The step as training takes it, in memory of this process."""
        tokens_BS, labels_BS = self.numbers_KBS.long().unbind()
        positions_BS, document_ids_BS = _documents(self.starts, tokens_BS.shape[1])
        batch = Batch(
            tokens_BS,
            labels_BS,
            positions_BS,
            document_ids_BS,
            torch.tensor(self.sample_ids, dtype=torch.int64),
            self.valid_counts,
            self.document_counts,
            self.lengths,
            self.pairs,
            None if self.media is None else self.media.arrived(),
        )
        return Step(batch, self.valid_count, self.tokens, self.lost, self.waiting)

    def pin_memory(self) -> Step:
        """The step in page-locked memory."""
        return self.unpacked().pin_memory()


def make_parcel(
    samples: Iterable[Sample],
    sample_ids: Sequence[int],
    others_valid: int,
    others_tokens: int,
    decode: bool = True,
) -> Parcel:
    """The samples of a step in shared memory, each written there before the next is read, with what is known of those
    that other ranks read; items are decoded, or left to whoever takes the step."""
    numbers_KBS: Tensor | None = None
    starts, valid_counts, document_counts, lengths, pairs = [], [], [], [], []
    media: CarriedMedia | None = None
    lost: list[str] = []
    encoded: list[Items] = []
    for place, sample in enumerate(samples):
        if numbers_KBS is None:
            numbers_KBS = torch.empty(2, len(sample_ids), len(sample.tokens_S), dtype=torch.int32)
            numbers_KBS.share_memory_()  # type: ignore[no-untyped-call]
            numbers = numbers_KBS.numpy()
        numbers[0, place] = sample.tokens_S
        numbers[1, place] = sample.labels_S
        if sample.starts is not None:
            starts.append(sample.starts)
        valid_counts.append(sample.valid)
        document_counts.append(sample.document_count)
        lengths.append(sample.length)
        pairs.append(sample.pairs)
        if sample.media is not None and not decode:
            encoded.append(sample.media)
        elif sample.media is not None:
            media = media or carrier_for(sample.media, len(sample_ids), shared=True)
            lost += media.put(place, sample.media)
    assert numbers_KBS is not None
    return Parcel(
        numbers_KBS,
        tuple(starts),
        tuple(sample_ids),
        tuple(valid_counts),
        tuple(document_counts),
        tuple(lengths),
        sum(valid_counts) + others_valid,
        sum(lengths) + others_tokens,
        _pairs_of(pairs),
        media,
        tuple(lost),
        encoded_media(encoded) if encoded else None,
    )
