"""One GPU per rank of a machine, or none for any."""

import os

import torch

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.ranks import Place

RANKS_PER_CORE = 64
"""More than a test of a large layout needs; thousands of processes on a laptop stop it."""


def require_devices(job: Job, ranks_here: int) -> None:
    """Reject ranks that would have to share a GPU, or more processes than the cores can serve; asks only the driver, so
    that no GPU memory is used."""
    name = job.run.device
    if name.startswith("cuda:"):
        raise UserError(f'run.device = "{name}" is one GPU, but every rank needs its own; set run.device = "cuda"')
    count = torch.cuda.device_count()
    if name in ("auto", "cuda") and count and ranks_here > count:
        raise UserError(
            f"{ranks_here} ranks on this machine need as many GPUs, but it has {count}; start at most {count} here "
            f'or set run.device = "cpu"'
        )
    cores = os.cpu_count() or 1
    if ranks_here > RANKS_PER_CORE * cores:
        raise UserError(
            f"{ranks_here} ranks on this machine are too many processes for its {cores} cores; start at most "
            f"{RANKS_PER_CORE * cores} here"
        )


def with_own_device(job: Job, place: Place) -> Job:
    """The job with run.device set to the rank's own GPU, if the job wants GPUs and there are any."""
    if place.local_size is not None:
        require_devices(job, place.local_size)
    count = torch.cuda.device_count()
    if job.run.device not in ("auto", "cuda") or not count:
        return job
    if place.local_rank >= count > 1:
        raise UserError(
            f"LOCAL_RANK = {place.local_rank} has no GPU of its own on this machine, which has {count}; start at most "
            f'{count} ranks here or set run.device = "cpu"'
        )
    # A scheduler that binds tasks to GPUs shows each task only its own.
    own = f"cuda:{0 if count == 1 else place.local_rank}"
    return job.model_copy(update={"run": job.run.model_copy(update={"device": own})})
