"""A job made small enough for CPU processes, with everything kept that decides how a layout cuts it."""

from math import prod
from typing import Any

from meshwright.job import Job
from meshwright.job.devices import Layout
from meshwright.verify.documents import HELD_OUT

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
    accumulation = _few(job.accumulation)
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
    small["data"] |= {"validation_fraction": 0.01, "weights": None}
    small["evaluation"] |= {"every_steps": steps, "batches": HELD_OUT, "sample_tokens": 0}
    small["schedule"] |= {"warmup_steps": min(job.warmup_steps, 1), "decay_steps": min(job.decay_steps, 1)}
    small["optimizer"] |= {"lr": 1e-3, "eps": 1e-3}
    small["precision"]["compute"] = "fp32"
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
    return Job.model_validate(small), notes


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
    return layout.model_copy(update=degrees), notes


def _few(count: int) -> int:
    """1 stays 1; more becomes 2 where it is even and 3 where it is odd."""
    return 1 if count == 1 else 2 if count % 2 == 0 else 3


def _model(job: Job, layout: Layout, sequence: int) -> dict[str, Any]:
    shape, was = job.model, job.layout
    heads, kv_heads = _heads(job, layout)
    head_dim = 8 if heads <= 6 else 4
    as_wide_as_heads = shape.heads * shape.head_dim == shape.width
    least = 1 if shape.layers == 1 else max(2, layout.pp)
    window = shape.sliding_window
    return shape.model_dump() | {
        "preset": None,
        "init_from": None,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "width": heads * head_dim if as_wide_as_heads else (heads + layout.tp) * head_dim,
        "ffn_width": 20 * layout.tp,
        "layers": _alike(least, shape.layers, (2, 2), (was.pp, layout.pp)),
        "vocab_size": _alike(50, shape.vocab_size, (2, 2), (was.tp, layout.tp)),
        "max_sequence_length": sequence + (0 if shape.max_sequence_length == job.batch.sequence_length else 5),
        "sliding_window": None if window is None else 7 if window < job.batch.sequence_length else 2 * sequence,
    }


def _heads(job: Job, layout: Layout) -> tuple[int, int]:
    """Query and key-value heads: the same answer to whether tp divides the latter, and the same kind of grouping."""
    shape, tp = job.model, layout.tp
    grouping = _few(shape.heads // shape.kv_heads)
    if shape.kv_heads % job.layout.tp == 0:
        kv_heads = tp * min(2, shape.kv_heads // job.layout.tp)
        return kv_heads * grouping, kv_heads
    kv_heads = 1 if job.layout.tp % shape.kv_heads == 0 else tp + 1
    while kv_heads * grouping % tp:
        grouping += 1
    return kv_heads * grouping, kv_heads


def _sequence(job: Job, layout: Layout) -> int:
    pairs = ((job.layout.tp, layout.tp), (2 * job.layout.cp, 2 * layout.cp))
    return _alike(16, job.batch.sequence_length, *pairs)


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
