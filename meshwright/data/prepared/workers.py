"""The processes that prepare: as many as cores, told one unit at a time, gone when the one that started them is."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from meshwright.data.hashing import fraction_of
from meshwright.data.join import Joined
from meshwright.data.limits import bound_memory
from meshwright.data.prepared.folder import TOKENIZER, Shard
from meshwright.data.prepared.shard import Work, make_shard, read_joined
from meshwright.data.raw import Bad, BadDocuments, MediaTaking, Taking, Text, Unit
from meshwright.data.raw.media import unmarked
from meshwright.data.split import documents_begun
from meshwright.data.tokenizer import Tokenizer, allow_threads, load_tokenizer, train_tokenizer
from meshwright.errors import UserError

TRAINING_BYTES = 20_000_000
"""More text hardly changes the merges of a tokenizer."""
_TRAINING_UNITS = 64
_SAMPLING_KEY = 0x70_4B_E2
_TICK_S = 0.2
_PR_SET_PDEATHSIG = 1
SMALL_BYTES = 4 << 20
"""So little plain text is read by the process itself, sooner than it could start another."""
_INSTANT_BYTES = 256 << 10
"""A tokenizer is trained on so little at once, before anybody could want to interrupt it."""

T = TypeVar("T")
Initializer = tuple[Callable[..., None], tuple[Any, ...]]


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


def is_small(units: Sequence[Unit], taking: Taking) -> bool:
    """Whether the input is so little, and of such a kind, that reading it needs no process with bounds of its own."""
    files = [piece.file for unit in units for piece in unit.pieces]
    if isinstance(taking, MediaTaking):
        return False  # decoders of foreign files, each with memory of its own
    plain = all(file.format in ("text", "jsonl") and file.compression == "none" for file in files)
    return plain and len(units) == 1 and units[0].size_bytes <= SMALL_BYTES and not any(file.remote for file in files)


def run_units(
    work: Work, units: Sequence[Unit], workers: int, follow: Callable[[Counts], bool]
) -> Iterator[Shard | Half]:
    """Make the shards of the units in any order, every core at work even where units are few.

    `follow` hears of it again and again; once it says false, units under way are given up.
    """
    if not units:
        return
    shared = _Shared(_context())
    if is_small(units, work.taking):
        yield from _run_here(work, units[0], shared, follow)
        return

    def goes_on() -> bool:
        if not follow(shared.counts()):
            shared.stop.set()
        return not shared.stop.is_set()

    def init(threads: int) -> Initializer:
        return _begin, (os.getpid(), work, shared, threads)

    yield from _spread(_one, units, workers, init, goes_on, shared.stop.set)


def _run_here(work: Work, unit: Unit, shared: _Shared, follow: Callable[[Counts], bool]) -> Iterator[Shard | Half]:
    follow(shared.counts())
    with _opened(work.joined) as joined:
        yield _make(unit, work, shared, load_tokenizer(work.out / TOKENIZER), joined)
    follow(shared.counts())


def count_documents(units: Sequence[Unit], taking: Taking, workers: int) -> Iterator[tuple[int, int, BadDocuments]]:
    """For each unit, in any order: its number, the documents that begin in it, and those that cannot be used."""

    def init(threads: int) -> Initializer:
        return _begin_counting, (os.getpid(), taking)

    for number, documents, bad in _spread(_count, units, workers, init):
        yield number, documents, BadDocuments(bad)


def _spread(
    one: Callable[[Unit], T],
    units: Sequence[Unit],
    workers: int,
    init: Callable[[int], Initializer],
    goes_on: Callable[[], bool] = lambda: True,
    stop: Callable[[], None] = lambda: None,
) -> Iterator[T]:
    """Do something with every unit, in processes that begin with what `init` says for their number of threads."""
    processes = min(workers, len(units))
    initializer, initargs = init(max(1, workers // processes))
    pool = ProcessPoolExecutor(processes, _context(), initializer=initializer, initargs=initargs)
    todo = iter(units)
    pending: dict[Future[T], Unit] = {}
    going = True
    try:
        while True:
            while going and len(pending) < 2 * processes and (unit := next(todo, None)) is not None:
                pending[pool.submit(one, unit)] = unit
            if not pending:
                break
            for future in wait(pending, timeout=_TICK_S, return_when=FIRST_COMPLETED).done:
                made = future.result()
                del pending[future]
                yield made
            going = goes_on()
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process was killed at one of {_names(pending.values())}, perhaps for lack of memory or by a "
            f"damaged file; leave that file out, or run meshwright data prepare with fewer --workers than {workers}: "
            "finished shards are kept"
        ) from error
    finally:
        stop()
        pool.shutdown(cancel_futures=True)


def _names(units: Iterable[Unit]) -> str:
    names = list(dict.fromkeys(piece.file.name for unit in units for piece in unit.pieces))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def train_on(units: Sequence[Unit], taking: Taking, vocab_size: int, joined: Path | None = None) -> str:
    """A tokenizer.json learned from documents all over the input.

    In a process of its own where there is more than a little: the library's threads would not survive into workers
    forked from one that used them, and only a process can be ended while the library works.
    """
    if is_small(units, taking) and units[0].size_bytes <= _INSTANT_BYTES:
        return _train(units, taking, vocab_size, joined)
    with ProcessPoolExecutor(1, _context(), initializer=_obey, initargs=(os.getpid(),)) as pool:
        trainer = pool.submit(os.getpid).result()
        try:
            return pool.submit(_train_bounded, list(units), taking, vocab_size, joined).result()
        except KeyboardInterrupt:
            os.kill(trainer, signal.SIGKILL)
            raise
        except BrokenProcessPool as error:
            raise UserError(
                f"training the tokenizer was killed at one of {_names(units)}, perhaps for lack of memory or by a "
                "damaged file; leave that file out, or give a tokenizer"
            ) from error


@contextmanager
def _opened(path: Path | None) -> Iterator[Joined | None]:
    if path is None:
        yield None
        return
    with closing(Joined(path)) as joined:
        yield joined


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
    return _make(unit, *_work)


def _make(unit: Unit, work: Work, shared: _Shared, tokenizer: Tokenizer, joined: Joined | None) -> Shard | Half:
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
        shard = make_shard(work, unit, tokenizer, joined, bad, watch, heard)
    except _Stopped:
        return Half(unit.number, bad.told())
    shared.add(read_bytes=unit.size_bytes - read)
    return shard


_taking: Taking


def _begin_counting(parent: int, taking: Taking) -> None:
    global _taking
    _obey(parent)
    bound_memory()
    _taking = taking


def _count(unit: Unit) -> tuple[int, int, dict[str, Any]]:
    documents, bad = 0, BadDocuments()
    for item in documents_begun(unit, _taking):
        if isinstance(item, Bad):
            bad.add(item.kind, item.place)
        else:
            documents += 1
    return unit.number, documents, bad.told()


def _train_bounded(units: list[Unit], taking: Taking, vocab_size: int, joined: Path | None) -> str:
    bound_memory()
    allow_threads(os.cpu_count() or 1)
    return _train(units, taking, vocab_size, joined)


def _train(units: Sequence[Unit], taking: Taking, vocab_size: int, path: Path | None) -> str:
    with _opened(path) as joined:
        return train_tokenizer(_sample(units, taking, joined), vocab_size).to_json()


def _sample(units: Sequence[Unit], taking: Taking, joined: Joined | None) -> Iterator[str]:
    """About TRAINING_BYTES of text: documents from all over the input, of a large one the beginnings of some units."""
    if len(units) > _TRAINING_UNITS:
        chosen = [units[number * len(units) // _TRAINING_UNITS] for number in range(_TRAINING_UNITS)]
        for unit in chosen:
            yield from _until(_texts([unit], taking, joined), TRAINING_BYTES // _TRAINING_UNITS)
        return
    share = TRAINING_BYTES / max(1, sum(unit.size_bytes for unit in units))
    texts = enumerate(_texts(units, taking, joined))
    yield from _until(
        (text for number, text in texts if number == 0 or fraction_of(number, _SAMPLING_KEY) < share), TRAINING_BYTES
    )


def _texts(units: Sequence[Unit], taking: Taking, joined: Joined | None) -> Iterator[Text]:
    for unit in units:
        for item in read_joined(unit, taking, joined):
            if isinstance(item, Text):
                yield item._replace(text=unmarked(item.text)) if item.media else item


def _until(texts: Iterator[Text], enough: int) -> Iterator[str]:
    taken = 0
    for text in texts:
        yield text.text
        taken += text.size_bytes
        if taken >= enough:
            return
