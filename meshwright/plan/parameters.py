"""How many elements a rank holds of a stage."""

from meshwright.cost import block_parameters
from meshwright.job import Job


def layer_parameters(job: Job) -> float:
    """Elements of one block on one tensor-parallel rank."""
    return block_parameters(job.model, job.layout.tp)


def stage_parameters(job: Job, layers: int, *, first: bool, last: bool) -> float:
    """Elements of a stage on one tensor-parallel rank; a tied table is held at both ends of a pipeline."""
    model = job.model
    table = model.vocab_size * model.width / job.layout.tp
    tables = (first or last) if model.tied and job.layout.pp == 1 else first + last
    positions = model.max_sequence_length * model.width if first and model.positions == "learned" else 0
    return layers * layer_parameters(job) + tables * table + positions
