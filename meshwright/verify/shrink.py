"""A job made small enough for CPU processes, with everything kept that decides how a layout cuts it."""

from itertools import count
from math import prod
from typing import Any

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Budget, Layout
from meshwright.layout import budget_span, is_asynchronous, table_of
from meshwright.pipeline import build_table, require_schedule
from meshwright.verify.compressed import COMPRESSED_REFERENCE, LOSSLESS, is_lossy, only_replicates
from meshwright.verify.documents import HELD_OUT
from meshwright.verify.stale import STALE_REFERENCE

MOST_RANKS = 8
AXES = ("dp_replicate", "dp_shard", "cp", "pp", "tp")
"""In the order in which degrees are given up when there are too many ranks."""


def shrink(job: Job, steps: int = 3) -> tuple[Job, list[str]]:
    """The job at CPU size, and one note for each thing that is not as the job says.

    Kept: whether tp divides the key-value heads, the vocabulary and the sequence, whether pp divides the layers and
    2·cp the sequence, ties, odd counts, grouped heads, and whether gradients are accumulated.
    """
    layout, notes = _layout(job.layout)
    sequence = _sequence(job, layout)
    model = _model(job, layout, sequence)
    accumulation = _accumulation(job, layout)
    micro_batch = min(job.batch.micro_batch, 2)
    data_parallel = layout.dp_replicate * layout.dp_shard
    small: dict[str, Any] = job.model_dump()
    small["layout"] = layout.model_dump()
    small["model"] = model
    small["batch"] = {
        "sequence_length": sequence,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * data_parallel * accumulation,
    }
    small["data"] |= {"sources": ("builtin:synthetic",), "tokenizer": None, "mask_documents": True, "workers": 0}
    small["data"] |= {"validation_fraction": 0.01, "stream": False, "weights": None, "stages": ()}
    evaluate_every = steps
    if is_asynchronous(job):
        # A stage's first update shows in its forward up to pp steps later; then the pipeline empties and fills again.
        evaluate_every = layout.pp + 1
        steps = max(steps, evaluate_every + layout.pp)
        notes.append(f"{STALE_REFERENCE}, over {steps} steps")
    # All held-out sequences; packed otherwise they may be as many as tokens.
    held_out = HELD_OUT if job.data.packing == "concatenate" else HELD_OUT * sequence
    small["evaluation"] |= {"every_steps": evaluate_every, "batches": held_out, "sample_tokens": 0, "sets": {}}
    small["schedule"] |= {"warmup_steps": min(job.warmup_steps, 1), "decay_steps": min(job.decay_steps, 1)}
    small["optimizer"] |= {"lr": 1e-3, "eps": 1e-3}
    small["precision"] |= {"compute": "fp32", "gradients": "fp32"}
    small["run"] |= {"steps": steps, "device": "cpu", "compile": False, "on_bad_step": "keep", "folder": None}
    for section in ("checkpoint", "cluster", "log"):
        del small[section]

    before, after = job.model, model
    notes.append(
        f"model shrunk: width {before.width} → {after['width']}, layers {before.layers} → {after['layers']}, "
        f"heads {before.heads}/{before.kv_heads} → {after['heads']}/{after['kv_heads']}, "
        f"vocabulary {before.vocab_size} → {after['vocab_size']}, sequence {job.batch.sequence_length} → {sequence}, "
        f"accumulation {job.accumulation} → {accumulation}"
    )
    notes.append("text: synthetic documents of unequal length, masked from each other")
    notes.append("optimizer: lr 1e-3 and eps 1e-3, so that rounding in gradients that are zero is not blown up")
    if job.run.compile:
        notes.append("run.compile is switched off")
    if isinstance(job.memory.recompute, Budget):
        small["memory"]["recompute"] = "none"
        small["memory"]["recompute"] = _budget(job, job.memory.recompute, Job.model_validate(small))
        notes.append("memory.recompute: the same share between all blocks recomputed and none")
    return Job.model_validate(small), notes


def _budget(job: Job, budget: Budget, small: Job) -> Budget:
    """The budget that leaves a small job as much room as the job has."""
    spans = [budget_span(each, table_of(each) if each.layout.pp > 1 else None) for each in (job, small)]
    (least, most), (small_least, small_most) = spans
    share = min(1.0, (budget.budget_gib * 2**30 - least) / max(1, most - least))
    return Budget(budget_gib=(small_least + max(0.0, share) * (small_most - small_least) + 1) / 2**30)


def _layout(layout: Layout) -> tuple[Layout, list[str]]:
    degrees = {axis: _few(getattr(layout, axis)) for axis in AXES}
    for fewer in (2, 1):
        for axis in AXES:
            if prod(degrees.values()) > MOST_RANKS and degrees[axis] > fewer:
                degrees[axis] = fewer
    notes = [
        f"layout.{axis} {getattr(layout, axis)} → {degree}"
        for axis, degree in degrees.items()
        if degree != getattr(layout, axis)
    ]
    held = layout.virtual_stages
    pipeline = {"virtual_stages": None if held is None or degrees["pp"] == 1 else _few(held), "split": None}
    if layout.split is not None:
        notes.append("layout.split → balanced")
    if layout.compress_after > 1:
        notes.append(f"layout.compress_after {layout.compress_after} → 1")
    first = {"compress_after": min(layout.compress_after, 1)}
    small = layout.model_copy(update=degrees | pipeline | first)
    if is_lossy(layout):
        compression, note = _compression(small)
        small = small.model_copy(update=compression)
        notes.append(note)
    return small, notes


def _compression(layout: Layout) -> tuple[dict[str, Any], str]:
    """How a lossy compression is checked, and a note that says so."""
    was = f'layout.compress "{layout.compress}"'
    if layout.dp_replicate == 1:
        return {"compress": "none"}, f'{was} → "none", as no replicas are left'
    if only_replicates(layout):
        return {}, COMPRESSED_REFERENCE
    return LOSSLESS, f'{was} → "topk" with compress_ratio 1.0, which loses nothing'


def _accumulation(job: Job, layout: Layout) -> int:
    """A few micro-batches, as many more as the pipeline's schedule asks for."""
    few = _few(job.accumulation)
    return few if layout.pp == 1 else next(m for m in count(few) if _runs(layout, m))


def _runs(layout: Layout, micro_batches: int) -> bool:
    try:
        require_schedule(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)
    except UserError:
        return False
    return True


def _stages(layout: Layout, micro_batches: int) -> int:
    if layout.pp == 1:
        return 1
    table = build_table(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)
    return table.stages // table.parameter_copies


def _few(count: int) -> int:
    """1 stays 1; more becomes 2 where it is even and 3 where it is odd."""
    return 1 if count == 1 else 2 if count % 2 == 0 else 3


def _model(job: Job, layout: Layout, sequence: int) -> dict[str, Any]:
    shape, was = job.model, job.layout
    heads, kv_heads = _heads(job, layout)
    head_dim = 8 if heads <= 6 else 4
    as_wide_as_heads = shape.heads * shape.head_dim == shape.width
    stages_before, stages = _stages(was, job.accumulation), _stages(layout, _accumulation(job, layout))
    least = 1 if shape.layers == 1 else max(2, stages)
    window = shape.sliding_window
    return shape.model_dump() | {
        "preset": None,
        "init_from": None,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "width": heads * head_dim if as_wide_as_heads else (heads + layout.tp) * head_dim,
        "ffn_width": 20 * layout.tp,
        "layers": _alike(least, shape.layers, (2, 2), (stages_before, stages)),
        "vocab_size": _alike(50, shape.vocab_size, (2, 2), (was.tp, layout.tp)),
        "max_sequence_length": sequence + (0 if shape.max_sequence_length == job.batch.sequence_length else 5),
        "sliding_window": None if window is None else 7 if window < job.batch.sequence_length else 2 * sequence,
    }


def _heads(job: Job, layout: Layout) -> tuple[int, int]:
    """Query and key-value heads: the same answer to whether tp divides the latter, and the same kind of grouping."""
    shape, tp = job.model, layout.tp
    spreads = layout.cp_method == "ulysses"  # then cp must divide the heads of a tensor-parallel rank, and did
    before, parts = (each.tp * (each.cp if spreads else 1) for each in (job.layout, layout))
    grouping = _few(shape.heads // shape.kv_heads)
    if shape.kv_heads % job.layout.tp == 0:
        kv_heads = parts * min(2, shape.kv_heads // before)
        return kv_heads * grouping, kv_heads
    kv_heads = 1 if job.layout.tp % shape.kv_heads == 0 else tp + 1
    while kv_heads * grouping % parts:
        grouping += 1
    return kv_heads * grouping, kv_heads


def _sequence(job: Job, layout: Layout) -> int:
    if layout.cp == 1:
        return _alike(16, job.batch.sequence_length, (job.layout.tp, layout.tp))
    # 2·cp divides the sequence, or it would have been refused; the share of a rank is divided by tp as before.
    share = _alike(16 // layout.cp, job.batch.sequence_length // job.layout.cp, (job.layout.tp, layout.tp), (2, 2))
    return layout.cp * (share if share % 2 == 0 else 2 * share)


def _alike(least: int, value: int, *divisors: tuple[int, int]) -> int:
    """The smallest number that each pair's second divides just when its first divides the value.

    Where degrees shrank, pairs may contradict each other (6 layers on 4 stages: even, yet 2 must not divide them); the
    later ones count for more.
    """
    for skipped in range(len(divisors)):
        for number in range(least, least + 24):
            if all((number % small == 0) == (value % large == 0) for large, small in divisors[skipped:]):
                return number
    return least
