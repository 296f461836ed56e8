"""The processes that prepare: as many as cores, told one unit at a time, gone when the one that started them is."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from meshwright.data.join import Joined
from meshwright.data.limits import bound_memory
from meshwright.data.prepared.folder import TOKENIZER, Shard
from meshwright.data.prepared.shard import make_shard, read_joined
from meshwright.data.raw import BadDocuments, Taking, Text, Unit
from meshwright.data.tokenizer import Tokenizer, allow_threads, load_tokenizer, train_tokenizer
from meshwright.errors import UserError

TRAINING_BYTES = 64_000_000
"""More text hardly changes the merges of a tokenizer."""
_TRAINING_UNITS = 64
_TICK_S = 0.2
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Work:
    """What every worker needs to know."""

    out: Path
    taking: Taking
    joined: Path | None
    """The file of what is joined to the documents."""
    validation_fraction: float


@dataclass(frozen=True)
class Counts:
    """What the workers have passed so far."""

    read_bytes: int = 0
    documents: int = 0
    bad: int = 0
    retries: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class _Stopped(Exception):
    """Raised inside a unit when the work is given up."""


@dataclass(frozen=True)
class Half:
    """A unit that was given up: only its bad documents so far are told."""

    number: int
    bad: dict[str, Any]


@dataclass
class _Shared:
    """Counters in memory that all processes see, and the wish to stop."""

    context: Any
    values: Any = field(init=False)
    stop: Any = field(init=False)

    def __post_init__(self) -> None:
        self.values = self.context.Array("q", len(fields(Counts)))
        self.stop = self.context.Event()

    def add(self, *, read_bytes: int = 0, documents: int = 0, bad: int = 0, retries: int = 0) -> None:
        with self.values.get_lock():
            for place, more in enumerate((read_bytes, documents, bad, retries)):
                self.values[place] += more

    def counts(self) -> Counts:
        with self.values.get_lock():
            return Counts(*self.values)


def run_units(
    work: Work, units: Sequence[Unit], workers: int, follow: Callable[[Counts], bool]
) -> Iterator[Shard | Half]:
    """Make the shards of the units in any order, every core at work even where units are few.

    `follow` hears of it again and again; once it says false, units under way are given up.
    """
    if not units:
        return
    context = _context()
    shared = _Shared(context)
    processes = min(workers, len(units))
    threads = max(1, workers // processes)
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(os.getpid(), work, shared, threads))
    todo = iter(units)
    pending: dict[Future[Shard | Half], Unit] = {}
    try:
        while True:
            while not shared.stop.is_set() and len(pending) < 2 * processes and (unit := next(todo, None)) is not None:
                pending[pool.submit(_one, unit)] = unit
            if not pending:
                break
            for future in wait(pending, timeout=_TICK_S, return_when=FIRST_COMPLETED).done:
                made = future.result()
                del pending[future]
                yield made
            if not follow(shared.counts()):
                shared.stop.set()
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process was killed at one of {_names(pending.values())}, perhaps for want of memory or by a "
            f"damaged file; run the same command again with fewer --workers than {workers} or without that file: "
            "finished shards are kept"
        ) from error
    finally:
        shared.stop.set()
        pool.shutdown(cancel_futures=True)


def _names(units: Iterable[Unit]) -> str:
    names = list(dict.fromkeys(piece.file.name for unit in units for piece in unit.pieces))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def train_on(units: Sequence[Unit], taking: Taking, vocab_size: int, joined: Path | None = None) -> str:
    """A tokenizer.json learned from the beginnings of units all over the input.

    In a process of its own: the library's threads would not survive into workers forked from one that used them.
    """
    with ProcessPoolExecutor(1, _context(), initializer=_obey, initargs=(os.getpid(),)) as pool:
        try:
            return pool.submit(_train, list(units), taking, vocab_size, joined).result()
        except BrokenProcessPool as error:
            raise UserError(
                f"training the tokenizer was killed at one of {_names(units)}, perhaps for want of memory or by a "
                "damaged file; leave that file out, or give a --tokenizer"
            ) from error


def _context() -> Any:
    """Forked where that is safe, so that a worker starts in no time."""
    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def _obey(parent: int) -> None:
    """Ctrl-C is the parent's to handle; a parent that dies takes its workers with it, else they would write on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


_work: tuple[Work, _Shared, Tokenizer, Joined | None]


def _begin(parent: int, work: Work, shared: _Shared, threads: int) -> None:
    global _work
    _obey(parent)
    bound_memory()
    allow_threads(threads)
    joined = None if work.joined is None else Joined(work.joined)
    _work = (work, shared, load_tokenizer(work.out / TOKENIZER), joined)


def _one(unit: Unit) -> Shard | Half:
    work, shared, tokenizer, joined = _work
    read, bad = 0, BadDocuments()

    def watch(count: int, retries: int) -> None:
        nonlocal read
        # A column or two of a wide table, or an index read twice, must not carry progress past the unit's size.
        count = min(count, unit.size_bytes - read)
        read += count
        shared.add(read_bytes=count, retries=retries)
        if shared.stop.is_set():
            raise _Stopped

    def heard(documents: int, bad: int) -> None:
        shared.add(documents=documents, bad=bad)

    try:
        shard = make_shard(work.out, unit, tokenizer, work.taking, joined, work.validation_fraction, bad, watch, heard)
    except _Stopped:
        return Half(unit.number, bad.told())
    shared.add(read_bytes=unit.size_bytes - read)
    return shard


def _train(units: list[Unit], taking: Taking, vocab_size: int, path: Path | None) -> str:
    bound_memory()
    joined = None if path is None else Joined(path)
    allow_threads(os.cpu_count() or 1)
    count = min(len(units), _TRAINING_UNITS)
    chosen = [units[number * len(units) // count] for number in range(count)]

    def texts() -> Iterator[str]:
        for unit in chosen:
            taken = 0
            for item in read_joined(unit, taking, joined):
                if isinstance(item, Text):
                    yield item.text
                    taken += item.size_bytes
                    if taken >= TRAINING_BYTES // count:
                        break

    return train_tokenizer(texts(), vocab_size).to_json()
