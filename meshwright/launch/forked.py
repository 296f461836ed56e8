"""Fork CPU ranks from their launcher, so that no rank imports again what it has imported, above all torch.

Never for ranks on GPUs, which cannot be used in a fork of a process that has initialized them.
"""

import functools
import gc
import multiprocessing
import os
import runpy
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import IO, Any

import torch
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from meshwright.job import Job
from meshwright.torch_private.compiler import preload
from meshwright.train import frozen

_forks = True


def can_fork(job: Job) -> bool:
    """Whether a job's ranks use no GPU, on a system where a fork is safe."""
    return _forks and sys.platform == "linux" and (job.run.device == "cpu" or torch.cuda.device_count() == 0)


@contextmanager
def no_forks() -> Iterator[None]:
    """Inside, ranks are new programs: a fork of a process that has computed would wait for threads it does not have."""
    global _forks
    before, _forks = _forks, False
    try:
        yield
    finally:
        _forks = before


@contextmanager
def ranks_forked(job: Job) -> Iterator[None]:
    """Inside, torch's agent forks the ranks of `python -m meshwright ARGUMENTS` instead of starting new programs."""
    preload(job.run.compiles)

    torch.set_num_threads(1)  # a fork has none of the compute threads, and would wait for them
    agent: Any = api  # where it looks up how to start a rank
    gate = _Gate()
    starter, agent.get_subprocess_handler = agent.get_subprocess_handler, functools.partial(_Handler, gate)
    try:
        with frozen():
            yield
    finally:
        gate.open()
        agent.get_subprocess_handler = starter


class _Gate:
    """Keeps the ranks from connecting until all of them are forked.

    When a rank connects, a thread of the agent's store looks up its host name and holds a lock of the C library. A
    rank forked at that moment inherits the lock without the thread that would release it, and hangs once it connects.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._is_open = False

    def open(self) -> None:
        """All ranks are forked; the second call does nothing."""
        if not self._is_open:
            os.close(self._write)
            os.close(self._read)
        self._is_open = True

    def wait(self) -> None:
        """In a rank: wait until all are forked, or the launcher is gone."""
        os.close(self._write)
        os.read(self._read, 1)  # nothing is ever written: returns once no process holds the other end
        os.close(self._read)


class _Handler(SubprocessHandler):
    """The agent's handle on one rank."""

    def __init__(self, gate: _Gate, **given: Any) -> None:
        self._gate = gate
        super().__init__(**given)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        sys.stdout.flush()
        sys.stderr.flush()
        module, *words = args[args.index("-m") + 1 :]
        own = {name: value for name, value in env.items() if os.environ.get(name) != value}
        given = (module, words, own, self._stdout, self._stderr, self._gate)
        process = multiprocessing.get_context("fork").Process(target=_run, args=given)
        process.start()
        if int(env["LOCAL_RANK"]) == int(env["LOCAL_WORLD_SIZE"]) - 1:
            self._gate.open()
        return _Started(process)


class _Started:
    """A forked process with the part of Popen's interface that the agent uses."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid

    def poll(self) -> int | None:
        """The exit code if the process has ended."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Wait for the exit code."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code


def _run(
    module: str,
    words: list[str],
    environment: dict[str, str],
    out: IO[str] | None,
    err: IO[str] | None,
    gate: _Gate,
) -> None:
    """In the fork: reset to the state of a new program, then run the module."""
    gc.freeze()  # the launcher's garbage may belong to threads that a fork does not have
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _close_sockets()
    for file, descriptor in ((out, 1), (err, 2)):
        if file is not None:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment)  # only its own: some of the launcher's differ in a fork
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = [module, *words]
    sys.modules.pop(f"{module}.__main__", None)  # of the launcher; torch's log of this rank would begin with a warning
    gate.wait()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _close_sockets() -> None:
    """Close the sockets of the agent's store: while a rank holds them, its peers would not notice a dead launcher.

    Their numbers stay taken: what owns one here, and closes it later, would close another's socket otherwise.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        descriptor = int(name)
        try:
            if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.dup2(nothing, descriptor)
        except OSError:  # the listing's own descriptor
            continue
    os.close(nothing)
