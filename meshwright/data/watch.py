"""Who reads what: a roll of the worker processes, and a watch that names the one that keeps training waiting."""

import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable

SLOW_S = 20.0
"""How long training waits for data before it says for whom."""

Report = Callable[[str], None]
_IDLE = -1


class Roll:
    """Every worker's process and the sample its step begins with, in memory that workers and parent share."""

    def __init__(self, workers: int) -> None:
        self._pids = multiprocessing.RawArray("q", max(1, workers))
        self._samples = multiprocessing.RawArray("q", [_IDLE] * max(1, workers))
        self._workers = workers

    def begins(self, worker: int, sample: int) -> None:
        """Called by a worker before it reads a step."""
        self._pids[worker] = os.getpid()
        self._samples[worker] = sample

    def ends(self, worker: int) -> None:
        """Called by a worker when it has read it."""
        self._samples[worker] = _IDLE

    def processes(self) -> list[int]:
        """The workers that have begun to read, by their process."""
        return [pid for pid in self._pids if pid]

    def name_failed(self, error: str) -> str | None:
        """Which worker an error is about that tells of its process; None where it tells of none."""
        told = {int(number) for number in re.findall(r"\d+", error)} if "worker" in error else set()
        failed = [worker for worker in range(self._workers) if self._pids[worker] in told]
        return f"{self.name(failed[0])} failed ({error})" if failed else None

    def name_slowest(self) -> str:
        """The worker that reads the earliest step, which is the one that is waited for."""
        busy = [worker for worker in range(self._workers) if self._samples[worker] != _IDLE]
        if not busy:
            return f"any of data.workers = {self._workers} data workers, which have not begun to read"
        return self.name(min(busy, key=lambda worker: self._samples[worker]))

    def name(self, worker: int) -> str:
        """A worker by its number, its process and what it does."""
        sample = self._samples[worker]
        doing = "idle" if sample == _IDLE else f"reading the step of sample {sample}"
        return f"data worker {worker} of {self._workers} (process {self._pids[worker]}, {doing})"


class Watch:
    """A thread that tells once of every wait that becomes long."""

    def __init__(self, roll: Roll, report: Report) -> None:
        self.waiting_since: float | None = None
        self._roll, self._report = roll, report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="data watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _run(self) -> None:
        told: float | None = None
        while not self._ended.wait(min(1.0, SLOW_S / 4)):
            since = self.waiting_since
            if since is not None and since != told and time.monotonic() - since > SLOW_S:
                told = since
                self._report(f"training has waited {SLOW_S:g} s for {self._roll.name_slowest()}")


def to_stderr(sentence: str) -> None:
    """Say it where nobody else listens."""
    sys.stderr.write(sentence + "\n")
