"""`meshwright.train`: a job trained in this process, as one of torchrun's ranks, or on ranks of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.jobs import JobLike, loaded
from meshwright.api.runs import Run
from meshwright.errors import UserError
from meshwright.job import require_base, require_data

if TYPE_CHECKING:
    from meshwright.runs.callbacks import Callback

OnStep = Callable[[dict[str, Any]], Any]


def train(
    job: JobLike,
    *,
    callbacks: Callback | OnStep | Sequence[Callback | OnStep] = (),
    nproc: int = 1,
    resume: bool = False,
    trace: str | None = None,
    quiet: bool = True,
) -> Run:
    """Train a job and return its run; where an earlier run is in run.folder, only with `resume`, which continues it.

    Callbacks are objects like `meshwright.Callback`, or functions that are given every step's row: one or a sequence.
    With `nproc` so many ranks are started, and callbacks are called from a thread of this process; under torchrun this
    process is one of its ranks, and rank 0's callbacks are called. `trace` names steps, as "10-12", of which every rank
    writes a profile. Everything is in the run folder as `meshwright train` would have left it.
    """
    from rich.console import Console

    from meshwright.ranks import own_place
    from meshwright.runs.callbacks import Callbacks
    from meshwright.runs.output import lasting_streams

    given, console = loaded(job), Console(stderr=True, quiet=quiet)
    require_base(given.job)
    require_data(given.job.data, given.job.run.folder if resume else None)
    listening = Callbacks(_as_callbacks(callbacks))
    steps = None
    if trace is not None:
        from meshwright.train import TraceSteps

        steps = TraceSteps.parse(trace, given.job)
    place = own_place()
    if place is not None and nproc > 1:
        raise UserError(f"nproc = {nproc} would start ranks inside rank {place.rank} of {place.size}; leave it out")
    supervised = place is None and bool(given.job.run.max_restarts or given.job.run.watchdog_s)
    if nproc > 1 or supervised:  # somebody must outlive the process that trains
        from meshwright.api.launching import launch_ranks

        with lasting_streams():
            folder = launch_ranks(given, nproc, console, listening, write_report, resume=resume, trace=trace)
    else:
        from meshwright.launch.worker import run_job

        console.quiet = quiet or (place is not None and place.rank > 0)
        with lasting_streams():
            finished = run_job(given, console, place, write_report, resume, callbacks=listening, trace=steps)
        folder = finished.folder
    run = Run(folder)
    if place is None or place.rank == 0:
        listening.end(run)
    return run


def write_report(run: Path) -> None:
    """Write a run's page; one that cannot be written is no reason for a run to end otherwise: it can be made later."""
    from meshwright.studio import write_report as write

    try:
        write(run)
    except UserError as error:
        print(f"warning: report not written ({error}); write it later with meshwright report {run}", file=sys.stderr)


def _as_callbacks(callbacks: Callback | OnStep | Sequence[Callback | OnStep]) -> Iterator[Callback]:
    from meshwright.runs.callbacks import Callback

    for callback in callbacks if isinstance(callbacks, Sequence) else (callbacks,):
        if isinstance(callback, Callback):
            yield callback
        elif callable(callback):
            yield type("OnStep", (Callback,), {"on_step": staticmethod(callback)})()
        else:
            raise UserError(
                f"callbacks has a {type(callback).__name__}, which is neither a meshwright.Callback nor a function; "
                "derive its class from meshwright.Callback"
            )
