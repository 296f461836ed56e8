"""Which jobs are updated by one pass over memory, and what that means for the format of their gradients."""

import torch

from meshwright.job import Job
from meshwright.model.swiglu import HAS_TRITON
from meshwright.parallel.layout import ranks_of
from meshwright.parallel.precision import DTYPES


def updates_in_one_pass(job: Job) -> bool:
    """Whether a job's update on one GPU reads gradients in any format and writes the working copy itself."""
    adamw = job.optimizer.name == "adamw" and job.precision.optimizer_states == "fp32"
    return (
        adamw and DTYPES[job.precision.compute].itemsize == 2 and ranks_of(job.layout) == 1 and not job.memory.offload
    )


def one_pass_here(job: Job, device: torch.device) -> bool:
    """The same, where the device and its software can."""
    return device.type == "cuda" and HAS_TRITON and updates_in_one_pass(job)


def gradient_format(job: Job) -> torch.dtype:
    """The format gradients are kept in until the update.

    With one micro-batch a step nothing is added up: as backward makes them they are as exact as widened.
    """
    if job.accumulation == 1 and updates_in_one_pass(job):
        return DTYPES[job.precision.compute]
    return DTYPES[job.precision.gradients]
