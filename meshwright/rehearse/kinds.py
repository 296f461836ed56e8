"""Which ranks of a job differ: one of each kind is enough to rehearse them all."""

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from meshwright.job import Job
from meshwright.layout import (
    axes,
    holdings_of_rank,
    is_asynchronous,
    padded_vocabulary,
    ranks_of,
    recompute_modes,
    split_layers,
    table_of,
)
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
    """Its place in the pipeline, such as "last stage", and whether its part of the vocabulary is shorter; empty if
    there is nothing to say."""
    fewer: tuple[int, ...]
    """Pipeline ranks of this kind that hold fewer micro-batches at once, and so less memory."""


def kinds_of_ranks(job: Job) -> list[Kind]:
    """One of every kind, in the order of the pipeline.

    Ranks of one pipeline rank are alike but for their part of a vocabulary that tp does not divide. Where the number of
    shards does not divide a tensor the last ones are shorter, by less than a row each: rank 0 has the longest.
    Context-parallel ranks have equally many pairs of tokens. How many tokens an expert gets is another matter, see
    `limits_of`.
    """
    table = None if job.layout.pp == 1 else table_of(job)
    alike: dict[Signature, list[int]] = defaultdict(list)
    for pipeline_rank in range(job.layout.pp):
        alike[_signature(job, table, pipeline_rank)].append(pipeline_rank)
    each = ranks_of(job.layout) // job.layout.pp // job.layout.tp
    kinds = []
    for ranks in alike.values():
        held = {rank: _held(table, rank) for rank in ranks}
        fullest = max(ranks, key=lambda rank: (held[rank], -rank))
        fewer = tuple(rank for rank in ranks if held[rank] < held[fullest])
        parts = [_vocabulary_rows(job, table, fullest, place) for place in range(job.layout.tp)]
        for rows, count in Counter(parts).items():
            rank = first_rank(job, fullest, parts.index(rows))
            kinds.append(Kind(rank, fullest, len(ranks) * each * count, _name(job, table, rank), fewer))
    return sorted(kinds, key=lambda kind: kind.pipeline_rank)


def kind_of(job: Job, rank: int) -> Kind:
    """The kind that one rank is of, with this rank as the one to rehearse."""
    table = None if job.layout.pp == 1 else table_of(job)
    pipeline_rank, place = axis_rank(job, rank, "pp"), axis_rank(job, rank, "tp")
    own = _signature(job, table, pipeline_rank)
    alike = sum(_signature(job, table, other) == own for other in range(job.layout.pp))
    parts = [_vocabulary_rows(job, table, pipeline_rank, other) for other in range(job.layout.tp)]
    count = alike * parts.count(parts[place]) * ranks_of(job.layout) // job.layout.pp // job.layout.tp
    return Kind(rank, pipeline_rank, count, _name(job, table, rank), ())


def axis_rank(job: Job, rank: int, axis: str) -> int:
    """The place of a rank of the world along an axis of the layout."""
    sizes = axes(job.layout)
    return int(np.unravel_index(rank, tuple(sizes.values()))[list(sizes).index(axis)])


def first_rank(job: Job, pipeline_rank: int, tp_rank: int = 0) -> int:
    """The first rank of the world at a place along the pipeline and among tensor-parallel ranks."""
    places, sizes = {"pp": pipeline_rank, "tp": tp_rank}, axes(job.layout)
    return int(np.ravel_multi_index([places.get(name, 0) for name in sizes], tuple(sizes.values())))


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


def _name(job: Job, table: Table | None, rank: int) -> str:
    """A rank's place in the pipeline, and how many rows of its tables are padding."""
    pipeline_rank = axis_rank(job, rank, "pp")
    rows = _vocabulary_rows(job, table, pipeline_rank, axis_rank(job, rank, "tp"))
    padding = 0 if rows is None else padded_vocabulary(job) // job.layout.tp - rows
    words = f"{padding} rows of its vocabulary are padding" if padding > 1 else "a row of its vocabulary is padding"
    return ", ".join(filter(None, [place_in_pipeline(job, pipeline_rank), words if padding else ""]))


def _vocabulary_rows(job: Job, table: Table | None, pipeline_rank: int, place: int) -> int | None:
    """Rows of the vocabulary that a tp rank of a pipeline rank holds, without padding; None if it holds no table."""
    if table is not None and not (table.first_stages | table.last_stages) & {*table.stages_of(pipeline_rank)}:
        return None
    rows = padded_vocabulary(job) // job.layout.tp
    return min(rows, max(0, job.model.vocab_size - place * rows))


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
