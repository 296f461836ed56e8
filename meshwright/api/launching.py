"""Ranks started for a Python program: its job goes to them as a file, and what they record comes back as they do it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from meshwright.atomic import write_atomic
from meshwright.errors import UserError
from meshwright.job import job_text
from meshwright.reading import EVENTS, METRICS, Kind, Row, Tally, rows_in
from meshwright.registries import LOSSES, OPTIMIZERS, SCHEDULES, SINKS, SOURCES

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.job import Job, LoadedJob
    from meshwright.runs.callbacks import Callbacks
    from meshwright.runs.lifecycle import OnEnd

LOOK_EVERY_S = 0.2


def launch_ranks(
    given: LoadedJob,
    nproc: int,
    console: Console,
    callbacks: Callbacks,
    on_end: OnEnd,
    *,
    resume: bool,
    trace: str | None = None,
) -> Path:
    """Train a job on so many local ranks, and return its folder; failures are raised as `launch` does."""
    from meshwright.launch.elastic import launch
    from meshwright.launch.forked import can_fork, no_forks
    from meshwright.runs.lifecycle import run_path

    # Only a process without threads to compute with can be forked at any time.
    with nullcontext() if os.environ.get("OMP_NUM_THREADS") == "1" else no_forks():
        if not can_fork(given.job):
            require_installed(given.job)
        settings = given.job.run.model_copy(update={"folder": str(run_path(given, resume))})
        job = given.job.model_copy(update={"run": settings})
        with (
            TemporaryDirectory(prefix="meshwright-job-") as made,
            _following(Path(str(settings.folder)), callbacks),
        ):
            file = Path(made) / f"{given.name}.toml"
            file.write_text(job_text(job, "for the ranks"), encoding="utf-8")
            words = ["train", str(file), *["--resume"] * resume, *["--quiet"] * console.quiet]
            words += [] if trace is None else ["--trace", trace]
            return launch(replace(given, job=job), nproc, words, console, on_end=on_end, resume=resume).path


def require_installed(job: Job) -> None:
    """Refuse what is registered in this process alone where ranks are new programs."""
    named = [(OPTIMIZERS, job.optimizer.name), (SCHEDULES, job.schedule.name), (LOSSES, job.model.loss)]
    named += [(SINKS, name) for name in job.log.sinks]
    named += [(SOURCES, name.partition(":")[0]) for name in job.data.sources]
    for registry, name in named:
        if registry.is_own(name) and not registry.is_installed(name):
            raise UserError(
                f'the {registry.kind} "{name}" is registered in this process alone, and ranks are new ones; make it an '
                f"entry point of a package ({registry.group}), start this program with torchrun, or, for ranks on the "
                "CPU, with OMP_NUM_THREADS=1"
            )


@contextmanager
def _following(run: Path, callbacks: Callbacks) -> Iterator[None]:
    """While inside, rows that ranks write go to the callbacks, from a thread; what a callback raises ends the run."""
    if not callbacks:
        yield
        return
    follower = _Follower(run, callbacks)
    follower.start()
    try:
        yield
    finally:
        follower.end()
    if follower.error is not None:
        raise follower.error


class _Follower(threading.Thread):
    """Reads what is new in a run's files, and asks its ranks to stop where a callback says so."""

    def __init__(self, run: Path, callbacks: Callbacks) -> None:
        super().__init__(daemon=True)
        self.error: Exception | None = None
        self._run, self._callbacks = run, callbacks
        self._over, self._asked = threading.Event(), False
        self._offsets = {kind.name: _size(run / kind.name) for kind in (METRICS, EVENTS)}

    def run(self) -> None:
        """Until `end`."""
        while not self._over.wait(LOOK_EVERY_S):
            self._look()

    def end(self) -> None:
        """Read the rest."""
        self._over.set()
        self.join()
        self._look()

    def _look(self) -> None:
        if self.error is not None:
            return
        try:
            for row in self._new(METRICS):
                self._callbacks.row(row)
            for row in self._new(EVENTS):
                self._callbacks.event(str(row.pop("kind")), row)
        except Exception as error:  # the caller's, raised once the ranks have ended
            self.error = error
        if (self._callbacks.asked or self.error is not None) and not self._asked and not self._over.is_set():
            self._ask()

    def _new(self, kind: Kind) -> list[Row]:
        path = self._run / kind.name
        if _size(path) <= self._offsets[kind.name]:
            return []
        with path.open("rb") as file:
            file.seek(self._offsets[kind.name])
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._offsets[kind.name] += len(lines)
        return rows_in(lines, kind, Tally(kind.name))

    def _ask(self) -> None:
        from meshwright.launch.worker import STOP_FILE
        from meshwright.runs.callbacks import ASKED

        path = self._run / STOP_FILE
        if path.parent.is_dir():
            write_atomic(path, ASKED)  # a rank must not read it half-written
            self._asked = True


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
