"""A device that ran out of memory: what it held, what the plan had said, and what to lower."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.parallel import World
from meshwright.plan import predict
from meshwright.train.device import device_name
from meshwright.train.memory_usage import MemoryUsage


class OutOfMemory(UserError):
    """A device's memory was too small; another program may have taken some of it, so a restart may help."""


@contextmanager
def memory_errors_explained(job: Job, world: World) -> Iterator[None]:
    """A device that runs out of memory inside becomes a sentence with both figures and a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = f"{MemoryUsage(world.device).after_step(0):,} bytes held at most"
        if (predicted := predicted_bytes(job, world)) is not None:
            held += f" and {predicted:,} predicted"
        if world.device.type == "cuda":
            held += f", of {torch.cuda.get_device_properties(world.device).total_memory:,}"
        raise OutOfMemory(
            f"{device_name(world.device)} ran out of memory ({held}) with batch.micro_batch = {job.batch.micro_batch} "
            f"and batch.sequence_length = {job.batch.sequence_length}; lower one of them or choose a smaller model"
        ) from error


def predicted_bytes(job: Job, world: World) -> int | None:
    """What the plan says this rank holds of a GPU at most; None for a model of the user's own, which has no plan."""
    if job.model.file:
        return None
    # Of the machine only the number of ranks matters to memory.
    machine = Cluster(nodes=1, gpus_per_node=world.size, gpu="h100")
    return round(predict(job, machine).memory[world.axis_rank("pp")].device)
