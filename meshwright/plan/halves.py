"""What a backward in two halves holds in between, until gradients of weights are computed too.

Torch keeps the whole graph for the second half, and the gradients that come into every module with weights; what was
recomputed for the first half is recomputed again.
"""

from functools import lru_cache

from meshwright.job import Job
from meshwright.pipeline import Kind, unchecked_table
from meshwright.plan.compute import products_of, tokens_of
from meshwright.plan.experts import rows_of
from meshwright.plan.software import Software

InFlight = tuple[tuple[int, ...], tuple[int, ...]]
"""Of each stage, micro-batches whose activations are kept, and how many of them are between the halves."""


def incoming_bytes(job: Job, software: Software) -> float:
    """Gradients of a block's projections' results and of its norms', of one micro-batch."""
    model, layout = job.model, job.layout
    numbers = sum(rows * columns for rows, columns, _ in products_of(job, software))
    numbers += 2 * tokens_of(job) * model.width // (layout.tp if layout.sp else 1)
    if model.experts is not None:
        numbers += round(rows_of(job) * (2 * model.experts.ffn_width + model.width))
    return float(job.precision.number_bytes * numbers)


def head_bytes(job: Job) -> float:
    """Gradients that the head made in the forward, and of the final norm's result."""
    vocabulary = -(-job.model.vocab_size // job.layout.tp)
    weight = 0 if job.model.adapter is not None else vocabulary
    return float(job.precision.number_bytes * job.model.width * (weight + 2 * tokens_of(job)))


@lru_cache(maxsize=8192)
def halves_of_rank(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, rank: int
) -> tuple[InFlight, ...]:
    """Every different moment of a rank, after each of its actions."""
    table = unchecked_table(schedule, ranks, micro_batches, virtual_stages)
    stages = table.stages_of(rank)
    kept, between, seen = [0] * len(stages), [0] * len(stages), dict[InFlight, None]()
    for action in table.orders[rank]:
        place = stages.index(action.stage)
        if action.kind == Kind.FORWARD:
            kept[place] += 1
        elif action.kind == Kind.INPUT:
            between[place] += 1
        else:
            kept[place] -= 1
            between[place] -= action.kind == Kind.WEIGHT
        seen[tuple(kept), tuple(between)] = None
    return tuple(seen)
