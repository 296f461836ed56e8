"""Steps of training data in order, read ahead by worker processes; validation batches in a fixed order."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from meshwright.calls import callable_as
from meshwright.data.batch import Batch, Parcel, Step, make_parcel, stack_samples, stacked
from meshwright.data.media.ahead import DecodesAhead
from meshwright.data.media.carried import encoded_media
from meshwright.data.readers import Readers, WorkerDied, failure_of
from meshwright.data.samples import IGNORE, Sample, Windows
from meshwright.data.stages import DECODE, stage
from meshwright.data.stream import Stream
from meshwright.data.watch import Roll
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.data.media.gpu import GpuDecoder

NAMED_ITEMS = 5
"""So many items that could not be decoded are named."""


class Loader:
    """An endless iterator over steps; which samples they hold depends on the stream and the position alone.

    Rank r of n reads the r-th of n equal parts of every step; the position counts the samples of all ranks.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        global_batch: int,
        position: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        rank: int = 0,
        ranks: int = 1,
        decoder: "GpuDecoder | None" = None,
    ) -> None:
        roll = Roll(workers)
        self._steps = _Steps(stream, global_batch, rank, ranks, roll, decoder is None)
        self._decoder = decoder
        self._ahead: DecodesAhead | None = None
        self._position = position
        self.lost_items = 0
        """Pictures, films and sounds of this rank that could not be decoded, so far."""
        self.readers = Readers(self._steps, roll, workers=workers, prefetch=prefetch, pin_memory=pin_memory)

    @property
    def epochs(self) -> tuple[float, ...]:
        """How often each source (or all of them as one) was gone through up to the position."""
        return self._steps.stream.epochs(self._position)

    @property
    def position(self) -> int:
        """Number of the first sample not yet handed out: all that is needed to go on from here."""
        return self._position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        self.start()
        try:
            step = self._read() if self._ahead is None else self._ahead.next()
        except (UserError, WorkerDied):
            self.close()
            raise
        self._position += self._steps.global_batch
        if step.lost:
            self._tell(step.lost)
        return step

    def _read(self) -> Step:
        step: Step | Parcel | UserError | WorkerDied = self.readers.next()
        if isinstance(step, UserError | WorkerDied):
            raise step
        return step.unpacked() if isinstance(step, Parcel) else step

    def _decoded(self, step: Step) -> Step:
        if step.waiting is None or self._decoder is None:
            return step
        with stage(DECODE):
            media, lost = self._decoder.decode(step.waiting)
        return replace(step, batch=replace(step.batch, media=media), lost=tuple(lost), waiting=None)

    def _tell(self, lost: Sequence[str]) -> None:
        """Name the first few items that could not be decoded, and count all."""
        for name in lost[: max(0, NAMED_ITEMS - self.lost_items)]:
            self.readers.on_slow(f"an item could not be decoded and is empty: {name}")
        self.lost_items += len(lost)

    def start(self) -> None:
        """Have the workers read ahead from now on; the first step asked for would start them too.

        Workers are forked, and whatever this process changes later of the memory it holds now is copied: so they had
        better start before the weights are made.
        """
        if not self.readers.started:
            self.readers.start(itertools.count(self._position, self._steps.global_batch))
        if self._ahead is None and self._decoder is not None:
            self._ahead = DecodesAhead(self._read, self._decoded)

    def close(self) -> None:
        """End the workers; iterating again starts new ones at the position."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self.readers.close()


@dataclass(frozen=True)
class _Steps(Dataset[Step | Parcel | UserError | WorkerDied]):
    """A rank's part of every step, by the number of the step's first sample."""

    stream: Stream
    global_batch: int
    rank: int
    ranks: int
    roll: Roll
    decode: bool = True
    """Whether items are decoded here, and not on the device."""

    def __getitem__(self, first: int) -> Step | Parcel | UserError | WorkerDied:
        worker = get_worker_info()
        try:
            if worker is None:
                return self._read(first)
            self.roll.begins(worker.id, first)
            return make_parcel(*self._samples(first), decode=self.decode)
        except UserError as error:
            # Handed over as a value: raised in a worker it would arrive as a page of traceback.
            return error
        except Exception as error:
            if worker is None:
                raise
            return failure_of(self.roll, worker.id, error, "the tokens of data.sources")
        finally:
            if worker is not None:
                self.roll.ends(worker.id)

    def _read(self, first: int) -> Step:
        samples, mine, valid_count, tokens = self._samples(first)
        read = list(samples)
        batch, lost = stacked(read, mine, self.decode)
        items = [sample.media for sample in read if sample.media is not None]
        waiting = encoded_media(items) if items and not self.decode else None
        return Step(batch, batch.valid_count() + valid_count, sum(batch.lengths) + tokens, lost, waiting)

    def _samples(self, first: int) -> tuple[Iterator[Sample], range, int, int]:
        """This rank's samples, read as they are asked for, and their numbers; the labels and tokens of the others'."""
        share = self.global_batch // self.ranks
        mine = range(first + self.rank * share, first + (self.rank + 1) * share)
        others = itertools.chain(range(first, mine.start), range(mine.stop, first + self.global_batch))
        return map(self.stream.read, mine), mine, *self.stream.facts_of(others)


def validation_batches(windows: Windows, micro_batch: int, sequences: int) -> Iterator[Batch]:
    """The first so many sequences of the windows in their own order, in micro-batches; fewer when there are few.

    All have micro_batch samples: the last is filled up with repeats that have number -1 and no valid label.
    """
    yield from window_batches(windows, range(min(len(windows), sequences)), micro_batch)


def window_batches(windows: Windows, numbers: Sequence[int], micro_batch: int) -> Iterator[Batch]:
    """Some windows in micro-batches, as `validation_batches` gives the first ones."""
    for first in range(0, len(numbers), micro_batch):
        ids = list(numbers[first : first + micro_batch])
        samples = [windows.read(window) for window in ids]
        missing = micro_batch - len(ids)
        pairs = None if samples[-1].pairs is None else samples[-1].pairs[:0]
        filler = replace(samples[-1], labels_S=np.full(windows.sequence_length, IGNORE, np.int64), pairs=pairs)
        yield stack_samples(samples + [filler] * missing, ids + [-1] * missing)


callable_as(__name__, "meshwright.api.data", "loader")
