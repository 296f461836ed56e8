"""Which ranks of a job differ: one of each kind is enough to rehearse them all."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from meshwright.job import Job
from meshwright.layout import axes, holdings_of_rank, is_asynchronous, ranks_of, recompute_modes, split_layers, table_of
from meshwright.pipeline import Table

Signature = tuple[object, ...]
"""What a pipeline rank computes: equal for ranks that compute the same."""


@dataclass(frozen=True)
class Kind:
    """Ranks that hold the same weights' shapes and compute the same; the one to rehearse is the fullest of them."""

    rank: int
    pipeline_rank: int
    alike: int
    """Ranks of this kind in the world."""
    name: str
    """Its place in the pipeline, such as "last stage"; empty without one."""
    fewer: tuple[int, ...]
    """Pipeline ranks of this kind that hold fewer micro-batches at once, and so less memory."""


def kinds_of_ranks(job: Job) -> list[Kind]:
    """One of every kind, in the order of the pipeline.

    Ranks of one pipeline rank are alike: sharded tensors are padded to equal sizes, and context-parallel ranks have
    equally many pairs of tokens. How many tokens an expert gets is another matter, see `limits_of`.
    """
    table = None if job.layout.pp == 1 else table_of(job)
    alike: dict[Signature, list[int]] = defaultdict(list)
    for pipeline_rank in range(job.layout.pp):
        alike[_signature(job, table, pipeline_rank)].append(pipeline_rank)
    each = ranks_of(job.layout) // job.layout.pp
    kinds = []
    for ranks in alike.values():
        held = {rank: _held(table, rank) for rank in ranks}
        fullest = max(ranks, key=lambda rank: (held[rank], -rank))
        fewer = tuple(rank for rank in ranks if held[rank] < held[fullest])
        rank = first_rank(job, fullest)
        kinds.append(Kind(rank, fullest, len(ranks) * each, place_in_pipeline(job, fullest), fewer))
    return sorted(kinds, key=lambda kind: kind.pipeline_rank)


def kind_of(job: Job, rank: int) -> Kind:
    """The kind that one rank is of, with this rank as the one to rehearse."""
    pipeline_rank = pipeline_rank_of(job, rank)
    table = None if job.layout.pp == 1 else table_of(job)
    own = _signature(job, table, pipeline_rank)
    alike = sum(_signature(job, table, other) == own for other in range(job.layout.pp))
    count = alike * ranks_of(job.layout) // job.layout.pp
    return Kind(rank, pipeline_rank, count, place_in_pipeline(job, pipeline_rank), ())


def pipeline_rank_of(job: Job, rank: int) -> int:
    """The place of a rank along the pipeline."""
    sizes = axes(job.layout)
    return int(np.unravel_index(rank, tuple(sizes.values()))[list(sizes).index("pp")])


def first_rank(job: Job, pipeline_rank: int) -> int:
    """The first rank of the world at a place along the pipeline."""
    sizes = axes(job.layout)
    place = [pipeline_rank if name == "pp" else 0 for name in sizes]
    return int(np.ravel_multi_index(place, tuple(sizes.values())))


def place_in_pipeline(job: Job, pipeline_rank: int) -> str:
    """Where a pipeline rank's stages are, in words; empty without a pipeline."""
    if job.layout.pp == 1:
        return ""
    table = table_of(job)
    stages = table.stages_of(pipeline_rank)
    first, last = bool(table.first_stages & {*stages}), bool(table.last_stages & {*stages})
    if first and last:
        return "first and last stage"
    if first or last:
        return "first stage" if first else "last stage"
    numbers = ", ".join(map(str, stages))
    return f"stage{'s' if len(stages) > 1 else ''} {numbers}"


def _signature(job: Job, table: Table | None, pipeline_rank: int) -> Signature:
    if table is None:
        return ()
    modes = recompute_modes(job, table, pipeline_rank)
    layers = split_layers(job, table.stages // table.parameter_copies)
    stages = []
    for stage in table.stages_of(pipeline_rank):
        chain = table.chain_of(stage)
        own = layers[stage - chain[0]]
        blocks = [(modes[layer], job.model.has_experts(layer), job.model.window(layer)) for layer in own]
        stages.append((stage == chain[0], stage == chain[-1], *blocks))
    if is_asynchronous(job):  # each keeps its own number of versions of its weights
        stages.append((pipeline_rank,))
    return tuple(stages)


def _held(table: Table | None, pipeline_rank: int) -> int:
    """The most micro-batches that a rank's stages hold at once."""
    return max(sum(held) for held in holdings_of_rank(table, pipeline_rank))
