"""`meshwright.bench`: what a job reaches on this machine."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api.jobs import JobLike, load_job
from meshwright.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from meshwright.job import Job
    from meshwright.measure import Bench, DataBench
    from meshwright.parallel import World
    from meshwright.ranks import Place


def bench(
    job: JobLike, *, steps: int = 10, warmup: int = 3, profile: bool = False, trace: Path | str | None = None
) -> Bench | None:
    """Time a job's training steps in this process; nothing is saved but, in a new folder `trace`, two steps' trace.

    Under torchrun this process is one of its ranks, and all but rank 0 get None.
    """
    from rich.console import Console

    from meshwright.ranks import own_place

    folder = None if trace is None else Path(trace)
    return measured(load_job(job), own_place(), steps, warmup, profile, Console(quiet=True), folder)


def measured(
    job: Job,
    place: Place | None,
    steps: int,
    warmup: int,
    profile: bool,
    console: Console,
    trace: Path | None = None,
    nvtx: bool = False,
) -> Bench | None:
    """Measure in this process, alone or as a rank; of the ranks the first has the result.

    Traces go to the folder `trace`, or to the next free name if that is taken.
    """
    from meshwright.measure import bench as measure
    from meshwright.runs.lifecycle import prepare_data
    from meshwright.runs.rank_zero import from_rank_zero
    from meshwright.train import memory_errors_explained

    with _joined(job, place) as (own, world):
        corpus = prepare_data(own, console)
        with memory_errors_explained(own, world), console.status(f"{warmup} + {steps} steps"):
            folder = None if trace is None else from_rank_zero(world, _free(trace))
            result = measure(own, corpus, world, steps=steps, warmup=warmup, profile=profile, trace=folder, nvtx=nvtx)
    return result if place is None or place.rank == 0 else None


def measured_data(
    job: Job, place: Place | None, steps: int, warmup: int, step_s: float | None, console: Console
) -> DataBench | None:
    """Measure a job's loader, and how much of a step waits for it; of the ranks the first has the result.

    A step's time can be given. Samples that no model of the job reads are measured without a step.
    """
    from meshwright.measure import bench_data
    from meshwright.runs.lifecycle import prepare_data
    from meshwright.train import memory_errors_explained

    no_step = _unread(job) if place is None and job.data.fields else None
    with _joined(job, place, trains=no_step is None) as (own, world):
        corpus = prepare_data(own, console)
        with memory_errors_explained(own, world), console.status("measuring the loader"):
            result = bench_data(own, corpus, world, steps=steps, warmup=warmup, step_s=step_s, no_step=no_step)
    return result if place is None or place.rank == 0 else None


def _unread(job: Job) -> str | None:
    """Why no model of the job reads its pictures, film and sound; None if one does."""
    from meshwright.layout import require_layout

    try:
        require_layout(job, 1)
    except UserError as error:
        require_layout(job.model_copy(update={"data": job.data.model_copy(update={"fields": {}})}), 1)
        return str(error)
    return None


@contextmanager
def _joined(job: Job, place: Place | None, trains: bool = True) -> Iterator[tuple[Job, World]]:
    """The job on this process's device, and this process among its ranks; alone if nothing is trained."""
    import torch.distributed as dist

    from meshwright.launch.devices import with_own_device
    from meshwright.launch.failures import failures_written_down
    from meshwright.layout import require_layout, with_values
    from meshwright.parallel import World, join_world
    from meshwright.runs.auto import values_of_auto
    from meshwright.runs.rank_zero import from_rank_zero
    from meshwright.train import choose_device, prepare_device

    with failures_written_down():
        if trains:
            require_layout(job, 1 if place is None else place.size)
        if place is not None:
            job = with_own_device(job, place)
        device = choose_device(job)
        world = join_world(job, device) if trains else World(device)
        job = with_values(job, from_rank_zero(world, values_of_auto(job, device)))
        prepare_device(job, device)
        yield job, world
    if place is not None:
        dist.destroy_process_group()


def _free(folder: Path) -> Path:
    """The folder itself, or with the first number at its end that makes it new."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())
