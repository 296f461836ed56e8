"""Ranks on this machine: forked from a process that has imported torch, so that a check costs seconds, not minutes."""

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.torch_private.compiler import preload
from meshwright.torch_private.processes import give_gloo_one_thread
from meshwright.train import frozen
from meshwright.verify import staged
from meshwright.verify.collectives import record_groups

preload()  # otherwise every forked rank imports it again, which takes longer than the check itself

LATE_S = 1.0
"""How long after a rank's error other ranks' reports are awaited."""


class RankError(Exception):
    """A rank failed; the message names it and carries its traceback."""


class RankTimeout(RankError):
    """Ranks were still running at the timeout; the message names them."""


class RankGroup:
    """Some ranks running one function each, in their own processes and in one gloo process group."""

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout_s: float = 120.0,
        backend: str = "gloo",
        record: Path | None = None,
    ) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise RuntimeError("ranks cannot be forked once CUDA is initialised; run the check in its own process")
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-ranks-")
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._reports: dict[int, _Report] = {}
        context = multiprocessing.get_context("fork")
        sys.stdout.flush()
        sys.stderr.flush()
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        with frozen():
            for rank in range(size):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                place = _Place(rank, size, rendezvous, timeout_s, backend, record, self._stack_file(rank))
                # A rank must not hold the parent's ends of the pipes, or it would not notice that the parent died.
                process = context.Process(target=_rank_main, args=(place, theirs, list(self._pipes), function, args))
                process.start()
                theirs.close()
                self._processes.append(process)

    def poll(self, timeout_s: float) -> bool:
        """Receive what arrives within the time; True once every rank has answered. A failure stops all and is
        raised."""
        self._take_reports(timeout_s)
        failed = [report for report in self._reports.values() if report.failure is not None]
        if failed:
            self._take_late_reports()
            self.close()
            raise _cause([report for report in self._reports.values() if report.failure is not None])
        if len(self._reports) == len(self._pipes):
            return True
        if time.monotonic() > self._deadline:
            silent = [str(rank) for rank in range(len(self._pipes)) if rank not in self._reports]
            self.close()
            raise RankTimeout(f"rank {', '.join(silent)} did not answer within {self._timeout_s:.0f} s")
        return False

    def results(self) -> list[Any]:
        """What each rank returned, by rank."""
        return [self._reports[rank].result for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End every process, whatever it is doing."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:  # not before, or a rank that is about to answer would print that it cannot
            pipe.close()
        self._folder.cleanup()

    def _take_reports(self, timeout_s: float) -> None:
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in self._reports}
        for pipe in wait(list(waiting), timeout_s):
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                self._reports[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                self._reports[rank] = self._silent_death(rank)

    def _take_late_reports(self) -> None:
        """The kernel may close a killed rank's connections to its peers before the one to us: the peers' errors can
        be here before their cause."""
        until = time.monotonic() + LATE_S
        while len(self._reports) < len(self._pipes) and (left := until - time.monotonic()) > 0:
            self._take_reports(left)

    def _silent_death(self, rank: int) -> "_Report":
        process = self._processes[rank]
        process.join(timeout=5.0)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        # A rank that failed with an error keeps its connections until it is killed, so a death without an error is
        # never caused by another rank's error: it is reported before all of them.
        file = self._stack_file(rank)
        stack = file.read_text() if file.is_file() else ""
        return _Report(rank, 0.0, failure=f"rank {rank} died without reporting an error ({how})\n{stack}".rstrip())

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack-of-rank-{rank}"


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = 120.0,
    backend: str = "gloo",
    record: Path | None = None,
) -> list[Any]:
    """Run `function(*args)` on `size` forked ranks and return their results by rank.

    Each sees RANK, WORLD_SIZE and LOCAL_RANK and an initialised default process group, which with `record` records
    its collectives in that folder. The first error of any rank is
    raised here, before what it caused in its peers; a user's mistake keeps its type.
    """
    group = RankGroup(function, size, *args, timeout_s=timeout_s, backend=backend, record=record)
    try:
        while not group.poll(1.0):
            pass
        return group.results()
    finally:
        group.close()


@dataclass(frozen=True)
class _Place:
    rank: int
    size: int
    rendezvous: str
    timeout_s: float
    backend: str
    record: Path | None
    """Where its collectives are recorded."""
    stack_file: Path
    """Where Python writes what the rank was doing when a library crashes it."""


@dataclass(frozen=True)
class _Report:
    rank: int
    at: float
    result: Any = None
    failure: str | None = None
    users_mistake: bool = False


def _cause(failed: list[_Report]) -> Exception:
    """The failure that came first on the machine's clock."""
    first = min(failed, key=lambda report: (report.at, report.rank))
    assert first.failure is not None
    return UserError(first.failure) if first.users_mistake else RankError(first.failure)


def _rank_main(
    place: _Place, pipe: Connection, parents_ends: list[Connection], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()  # the parent's garbage may belong to threads that a fork does not have
    for end in parents_ends:
        end.close()
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.size), LOCAL_RANK=str(place.rank))
    torch.set_num_threads(1)
    if place.rank > 0:
        warnings.simplefilter("ignore")  # rank 0 says the same
    released = threading.Thread(target=_exit_when_released, args=(pipe,), daemon=True)
    faulthandler.disable()  # if it is on, but another library has taken its signals since, it would not take them back
    faulthandler.enable(place.stack_file.open("w"))
    try:
        staged.register()
        if place.record is not None:
            record_groups(place.record, place.rank)
        give_gloo_one_thread()
        dist.init_process_group(place.backend, init_method=place.rendezvous, rank=place.rank, world_size=place.size)
        released.start()
        message = _pickled(_Report(place.rank, time.monotonic(), result=function(*args)))
    except UserError as error:
        message = pickle.dumps(_Report(place.rank, time.monotonic(), failure=str(error), users_mistake=True))
    except BaseException:
        text = f"rank {place.rank} of {place.size} failed:\n{traceback.format_exc()}"
        message = pickle.dumps(_Report(place.rank, time.monotonic(), failure=text))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(message)
    # A rank that left now would break connections its peers may still use; the parent releases all together.
    time.sleep(place.timeout_s)
    os._exit(1)


def _exit_when_released(pipe: Connection) -> None:
    """The parent never writes: its end closes when it is done, or when it has died."""
    wait([pipe])
    os._exit(0)


class _Pickler(pickle.Pickler):
    """Tensors as arrays: torch's own way shares memory, which is gone when the rank exits."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16:
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()
