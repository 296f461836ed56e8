"""What the plan says of a rehearsed rank."""

from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import ranks_of
from meshwright.plan import any_machines, predict

_ON_GPUS = "workspaces"
"""The term that a CPU has not."""


@dataclass(frozen=True)
class Planned:
    """Planned bytes of a rank by term, and what the allocator is expected to take."""

    terms: dict[str, float]
    reserved: float


def planned_memory(job: Job, pipeline_rank: int, *, on_cpu: bool) -> Planned | None:
    """The planner's count for one pipeline rank; None for a job that it does not know."""
    if job.model.file or job.model.extra_tokens:
        return None
    try:
        memory = predict(job, any_machines(ranks_of(job.layout))).memory[pipeline_rank]
    except UserError:
        return None
    terms = {name: size for name, size in memory.terms.items() if size and not (on_cpu and name == _ON_GPUS)}
    return Planned(terms, memory.reserved)
