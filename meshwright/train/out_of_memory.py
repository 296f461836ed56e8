"""A device that ran out of memory: its peak, the plan's prediction, and what to lower."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.parallel import World
from meshwright.plan import any_machines, predict
from meshwright.train.device import device_name
from meshwright.train.memory_usage import MemoryUsage


class OutOfMemory(UserError):
    """A device ran out of memory; another program may have used some of it, so a restart may help."""


@contextmanager
def memory_errors_explained(job: Job, world: World) -> Iterator[None]:
    """Turn a device running out of memory inside into a sentence with both figures and a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = f"{MemoryUsage(world.device).after_step(0):,} bytes at peak"
        if (predicted := predicted_bytes(job, world)) is not None:
            held += f" and {predicted:,} predicted"
        if world.device.type == "cuda":
            held += f", of {torch.cuda.get_device_properties(world.device).total_memory:,}"
        raise OutOfMemory(
            f"{device_name(world.device)} ran out of memory ({held}) with batch.micro_batch = {job.batch.micro_batch} "
            f"and batch.sequence_length = {job.batch.sequence_length}; lower one of them or choose a smaller model"
        ) from error


def predicted_bytes(job: Job, world: World) -> int | None:
    """The planner's prediction of this rank's peak GPU memory; None for models that have no plan."""
    if job.model.file:
        return None
    return round(predict(job, any_machines(world.size)).memory[world.axis_rank("pp")].device)
