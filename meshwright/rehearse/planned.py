"""What the plan says of a rehearsed rank."""

from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.layout import holdings_of_rank, ranks_of, saved_by_name, table_of
from meshwright.plan import any_machines, predict
from meshwright.rehearse.charges import sends_of
from meshwright.torch_private.pipelining import WAITS_FOR_SENDS

_ON_GPUS = "workspaces"
"""The term that a CPU has not."""
_ON_CPUS = "sent and kept until the step ends"
"""The term that a GPU has not: torch before 2.15 waits for sends at the end of a step, and until then gloo keeps what
it has sent, while NCCL does so until it has arrived."""


@dataclass(frozen=True)
class Planned:
    """Planned bytes of a rank by term, and what the allocator is expected to take."""

    terms: dict[str, float]
    reserved: float


def planned_memory(job: Job, pipeline_rank: int, *, on_cpu: bool) -> Planned | None:
    """The planner's count for one pipeline rank; None for a job that it does not know."""
    if job.model.file:
        return None
    try:
        memory = predict(job, any_machines(ranks_of(job.layout))).memory[pipeline_rank]
    except UserError:
        return None
    terms = {name: size for name, size in memory.terms.items() if size and not (on_cpu and name == _ON_GPUS)}
    if on_cpu and job.layout.pp > 1 and not WAITS_FOR_SENDS:
        terms[_ON_CPUS] = _sent_bytes(job, pipeline_rank)
    return Planned(terms, memory.reserved)


def _sent_bytes(job: Job, pipeline_rank: int) -> float:
    """Hidden states and gradients of micro-batches that are done, which a rank has sent by its last forward."""
    table = table_of(job)
    in_flight = max(map(sum, holdings_of_rank(table, pipeline_rank)))
    done = 1 - in_flight / (len(table.stages_of(pipeline_rank)) * table.micro_batches / table.parameter_copies)
    hidden = saved_by_name(job, "full", first=False, last=False)["layers.0.", "input"]
    return done * sends_of(table, pipeline_rank) * hidden
