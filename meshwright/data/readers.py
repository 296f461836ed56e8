"""The worker processes of a loader: started, asked for the next item, named where they are slow or dead, ended."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from meshwright.data.watch import Report, Roll, Watch, to_stderr
from meshwright.data.worker_failures import deaths_told, workers_starting

STUCK_S = 900.0
"""How long training waits for one worker: a server is given up long before, so only what never ends takes so long."""
_DEATH_SIGNAL = 1
"""Linux's number for: send me this when my parent dies."""


class WorkerDied(RuntimeError):
    """A process that reads data is gone; whatever the words say of peers, they are not other ranks."""


class Readers:
    """So many worker processes that read a dataset ahead, or none: then it is read when it is asked for."""

    def __init__(
        self, dataset: Dataset[Any], roll: Roll, *, workers: int, prefetch: int, pin_memory: bool = False
    ) -> None:
        self._dataset, self._roll = dataset, roll
        self._workers, self._prefetch, self._pin_memory = workers, prefetch, pin_memory
        self._iterator: Iterator[Any] | None = None
        self._watch: Watch | None = None
        self.on_slow: Report = to_stderr
        """Told in a sentence of a worker that keeps training waiting."""

    @property
    def started(self) -> bool:
        """Whether they read."""
        return self._iterator is not None

    @property
    def processes(self) -> list[int]:
        """The worker processes that have begun to read."""
        return self._roll.processes()

    def start(self, sampler: Iterable[int] | None = None) -> None:
        """Begin to read: the items a sampler names, or all of a dataset that is iterated over."""
        many = self._workers > 0
        loader = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=sampler,
            collate_fn=_as_it_is,
            num_workers=self._workers,
            prefetch_factor=self._prefetch if many else None,
            timeout=STUCK_S if many else 0,
            pin_memory=self._pin_memory,
            worker_init_fn=_leave_signals_to_the_parent if many else None,
            multiprocessing_context="fork" if many and sys.platform == "linux" else None,
            # Without its own generator the loader would draw from the global one, and a resumed run would differ.
            generator=torch.Generator(),
        )
        with workers_starting():
            self._iterator = iter(loader)
        if many:
            self._watch = Watch(self._roll, lambda sentence: self.on_slow(sentence))

    def next(self) -> Any:
        """The next item; if a worker dies, all workers end and the error names it."""
        assert self._iterator is not None
        try:
            if self._watch is not None:
                self._watch.waiting_since = time.monotonic()
            with deaths_told():
                return next(self._iterator)
        except RuntimeError as error:
            stuck = self._roll.name_slowest() if "timed out after" in str(error) else None
            self.close()
            if stuck is not None:
                raise WorkerDied(
                    f"{stuck} gave nothing for {STUCK_S:g} s; see what keeps it (a disk or server of data.sources that "
                    "does not answer) and continue with --resume"
                ) from error
            raise self.explained(error) from error
        except (EOFError, OSError) as error:  # of a worker that dies while it hands over an item
            self.close()
            if self._workers == 0:
                raise
            raise _failed(f"one of data.workers = {self._workers} data worker processes failed ({error!r})") from error
        finally:
            if self._watch is not None:
                self._watch.waiting_since = None

    def explained(self, error: RuntimeError) -> RuntimeError:
        """The error itself, or one that names the worker whose death it tells of."""
        if isinstance(error, WorkerDied):
            return error  # told already
        failed = self._roll.name_failed(str(error)) if self._workers else None
        return error if failed is None else _failed(failed)

    def close(self) -> None:
        """End the workers."""
        self._iterator = None
        if self._watch is not None:
            self._watch.end()
            self._watch = None


def failure_of(roll: Roll, worker: int, error: Exception, what: str) -> WorkerDied:
    """What a worker hands over in the place of data when it could not read: raised there, it would be a traceback."""
    told = str(error).strip().splitlines() or ["no reason given"]
    failure = WorkerDied(
        f"{roll.name(worker)} failed at {what} ({type(error).__name__}: {told[0][:200]}); fix that, or try "
        "data.workers = 0, and continue with --resume"
    )
    failure.add_note("".join(traceback.format_exception(error)))  # shown by --debug
    return failure


def _as_it_is(item: Any) -> Any:
    return item


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C and a scheduler's warning reach a whole process group; a worker that died of them would fail the step.

    A scheduler's SIGTERM reaches every process; only the parent's own, with which it ends a stuck worker, is heeded.
    A worker ends with its parent, however that ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it was gone before we could ask
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_heed, args=(os.getppid(),), name="signals", daemon=True).start()
    os.setpgid(0, 0)
    for name in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)


def _heed(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def _failed(what: str) -> WorkerDied:
    return WorkerDied(
        f"{what}; it may have run out of memory or of space in /dev/shm: try fewer data.workers, or data.workers = 0"
    )
