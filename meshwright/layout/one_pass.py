"""Which jobs are updated by one pass over memory, and what that means for the format of their gradients."""

from meshwright.job import Job
from meshwright.layout.rules import ranks_of


def updates_in_one_pass(job: Job) -> bool:
    """Whether a job's update on one GPU reads gradients in any format and writes the working copy itself."""
    adamw = job.optimizer.name == "adamw" and job.precision.optimizer_states == "fp32"
    return adamw and job.precision.number_bytes == 2 and ranks_of(job.layout) == 1 and not job.memory.offload


def gradient_format(job: Job) -> str:
    """The format gradients are kept in until the update, as precision.compute or precision.gradients names it.

    With one micro-batch a step nothing is added up: as backward makes them they are as exact as widened.
    """
    if job.accumulation == 1 and updates_in_one_pass(job):
        return job.precision.compute
    return job.precision.gradients
