"""Steps of training data in order, read ahead by worker processes; validation batches in a fixed order."""

import ctypes
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

from meshwright.data.batch import Batch, Step, stack_samples
from meshwright.data.samples import IGNORE, count_valid, count_windows, read_sample, read_window
from meshwright.data.store import TokenStore
from meshwright.errors import UserError

_DEATH_SIGNAL = 1
"""Linux's number for: send me this when my parent dies."""


class Loader:
    """An endless iterator over steps; which samples they hold depends on seed and position alone.

    Rank r of n reads the r-th of n equal parts of every step; the position counts the samples of all ranks.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seed: int,
        sequence_length: int,
        global_batch: int,
        position: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        mask_documents: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if count_windows(store, sequence_length) == 0:
            raise UserError(
                f"data.sources hold {len(store)} training tokens, too few for one sequence of "
                f"batch.sequence_length = {sequence_length}, which takes {sequence_length + 1}; "
                "add text or choose a shorter sequence"
            )
        self._steps = _Steps(store, seed, sequence_length, global_batch, mask_documents, rank, ranks)
        self._position = position
        self._workers = workers
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._iterator: Iterator[Step | UserError] | None = None

    @property
    def position(self) -> int:
        """Number of the first sample not yet handed out: all that is needed to go on from here."""
        return self._position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        self.start()
        assert self._iterator is not None
        try:
            _error_if_any_worker_fails()
            step = next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:  # a worker that dies may be in the middle of a message
            self.close()
            if self._workers == 0:
                raise
            raise RuntimeError(
                f"one of data.workers = {self._workers} data worker processes failed ({str(error) or type(error).__name__}); it may have run out of "
                "memory or of space in /dev/shm: try fewer workers, or data.workers = 0"
            ) from error
        if isinstance(step, UserError):
            self.close()
            raise step
        self._position += self._steps.global_batch
        return step

    def start(self) -> None:
        """Have the workers read ahead from now on; the first step asked for would start them too.

        Workers are forked, and whatever this process changes later of the memory it holds now is copied: so they had
        better start before the weights are made.
        """
        if self._iterator is None:
            self._iterator = self._read_ahead()

    def close(self) -> None:
        """End the workers; iterating again starts new ones at the position."""
        self._iterator = None

    def _read_ahead(self) -> Iterator[Step | UserError]:
        many = self._workers > 0
        loader = DataLoader(
            self._steps,
            batch_size=None,
            sampler=itertools.count(self._position, self._steps.global_batch),
            collate_fn=_as_it_is,
            num_workers=self._workers,
            prefetch_factor=self._prefetch if many else None,
            pin_memory=self._pin_memory,
            worker_init_fn=partial(_leave_signals_to_the_parent, os.getpid()) if many else None,
            multiprocessing_context="fork" if many and sys.platform == "linux" else None,
            # Without its own generator the loader would draw from the global one, and a resumed run would differ.
            generator=torch.Generator(),
        )
        with _own_handler_kept(signal.SIGCHLD):
            return iter(loader)


@dataclass(frozen=True)
class _Steps(Dataset[Step | UserError]):
    """A rank's part of every step, by the number of the step's first sample."""

    store: TokenStore
    seed: int
    sequence_length: int
    global_batch: int
    mask_documents: bool
    rank: int
    ranks: int

    def __getitem__(self, first: int) -> Step | UserError:
        share = self.global_batch // self.ranks
        ids = range(first + self.rank * share, first + (self.rank + 1) * share)
        others = [i for i in range(first, first + self.global_batch) if i not in ids]
        settings = (self.store, self.seed, self.sequence_length)
        try:
            samples = [read_sample(*settings, i, self.mask_documents) for i in ids]
            elsewhere = sum(count_valid(*settings, i, self.mask_documents) for i in others)
        except UserError as error:
            # Handed over as a value: raised in a worker it would arrive as a page of traceback.
            return error
        batch = stack_samples(samples, ids)
        return Step(batch, batch.valid_count() + elsewhere)


def validation_batches(
    store: TokenStore, sequence_length: int, micro_batch: int, count: int, mask_documents: bool
) -> Iterator[Batch]:
    """The first count batches of the store in its own order; fewer when it is small.

    All have micro_batch samples: the last is filled up with repeats that have number -1 and no valid label.
    """
    windows = count_windows(store, sequence_length)
    if windows == 0:
        raise UserError(
            f"data.validation_fraction leaves {len(store)} tokens for validation, too few for one sequence of "
            f"batch.sequence_length = {sequence_length}; raise it or add text"
        )
    return _validation_batches(store, sequence_length, micro_batch, min(windows, count * micro_batch), mask_documents)


def _validation_batches(
    store: TokenStore, sequence_length: int, micro_batch: int, windows: int, mask_documents: bool
) -> Iterator[Batch]:
    for first in range(0, windows, micro_batch):
        ids = list(range(first, min(first + micro_batch, windows)))
        samples = [read_window(store, sequence_length, window, mask_documents) for window in ids]
        missing = micro_batch - len(ids)
        filler = replace(samples[-1], labels_S=np.full(sequence_length, IGNORE, np.int64))
        yield stack_samples(samples + [filler] * missing, ids + [-1] * missing)


@contextmanager
def _own_handler_kept(number: signal.Signals) -> Iterator[None]:
    """torch's handler of a dead worker raises in the middle of whatever runs then; the loader asks before it reads."""
    before = signal.getsignal(number)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, before or signal.SIG_DFL)


def _as_it_is(item: Any) -> Any:
    return item


def _leave_signals_to_the_parent(parent: int, worker: int) -> None:
    """Ctrl-C and a scheduler's warning reach a whole process group; a worker that died of them would fail the step.

    SIGTERM itself is not ignored, since the parent ends a stuck worker with it when it exits. A worker ends with its
    parent, however that ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before we could ask
            os._exit(1)
    os.setpgid(0, 0)
    for name in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)
