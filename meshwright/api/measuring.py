"""`meshwright.bench`: what a job reaches on this machine."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api.jobs import JobLike, load_job

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.job import Job
    from meshwright.measure import Bench
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
    import torch.distributed as dist

    from meshwright.launch.devices import with_own_device
    from meshwright.launch.failures import failures_written_down
    from meshwright.layout import require_layout
    from meshwright.measure import bench as measure
    from meshwright.parallel import join_world
    from meshwright.runs.lifecycle import prepare_data
    from meshwright.runs.rank_zero import from_rank_zero
    from meshwright.train import choose_device, memory_errors_explained, prepare_device

    with failures_written_down():
        require_layout(job, 1 if place is None else place.size)
        if place is not None:
            job = with_own_device(job, place)
        device = choose_device(job)
        prepare_device(job, device)
        world = join_world(job, device)
        corpus = prepare_data(job, console)
        with memory_errors_explained(job, world), console.status(f"{warmup} + {steps} steps"):
            folder = None if trace is None else from_rank_zero(world, _free(trace))
            result = measure(job, corpus, world, steps=steps, warmup=warmup, profile=profile, trace=folder, nvtx=nvtx)
    if place is not None:
        dist.destroy_process_group()
    return result if place is None or place.rank == 0 else None


def _free(folder: Path) -> Path:
    """The folder itself, or with the first number at its end that makes it new."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())
