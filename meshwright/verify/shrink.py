"""Shrinks a job to CPU size, keeping everything that decides how a layout shards it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import prod, sqrt
from typing import Any

import torch

from meshwright.errors import UserError
from meshwright.job import Adapter, Job
from meshwright.job.adapter import BLOCK
from meshwright.job.devices import Budget, Layout, Segments
from meshwright.layout import (
    THE_CPU,
    budget_span,
    device_of_check,
    is_asynchronous,
    resolve_auto,
    resolve_for,
    table_of,
)
from meshwright.pipeline import build_table, require_schedule
from meshwright.train import capabilities
from meshwright.verify.asynchronous import STALE_REFERENCE
from meshwright.verify.compressed import COMPRESSED_REFERENCE, LOSSLESS, is_lossy, only_replicates
from meshwright.verify.documents import HELD_OUT
from meshwright.verify.fused import PLAINLY, runs_plainly
from meshwright.verify.ranks import run_ranks
from meshwright.verify.shrink_encoder import encoder_words, small_encoder
from meshwright.verify.shrink_experts import small_ep, small_experts, small_latent, words

MOST_RANKS = 16
MOST_WORKERS = 2
MOST_SEGMENT = 2
"""Blocks that are recomputed together; three then have a shorter segment too."""
RANK = 3
"""Of adapters: no side of a small model's matrices has it."""
MOST_DEGREE = 4
"""A ring, an interleaved schedule or a tree of more ranks than this does nothing that it does not do with this many."""
AXES = ("dp_replicate", "dp_shard", "cp", "pp", "tp")
"""The order in which degrees are reduced when there are too many ranks."""


@dataclass(frozen=True)
class Change:
    """One thing that a check does differently from the job."""

    text: str
    hides: bool = False
    """Whether it could hide an error of the job; `verify --strict` fails then."""

    def __str__(self) -> str:
        return self.text


def resolved_for_check(job: Job, device: str) -> tuple[Job, list[Change]]:
    """The job in the formats of its cluster's GPUs, or of this machine's device where it names none; what is compiled
    there but cannot be compiled here is eager."""
    # In a fork, because this process forks ranks, which could not use a GPU that this one has used.
    here = run_ranks(capabilities, 1, torch.device(device))[0] if device == "cuda" else THE_CPU
    checked = resolve_auto(job, device_of_check(job.cluster, here))
    changes = []
    if resolve_for(job, job.cluster).run.compiles and not checked.run.compiles:
        text = "run.compile auto → false here, and true on the cluster's GPUs; --set run.compile=true compiles"
        changes.append(Change(text, hides=True))
    return checked, changes


def shrink(job: Job, steps: int = 3, device: str = "cpu") -> tuple[Job, list[Change]]:
    """The job at CPU size, and each change.

    Kept: whether tp divides the key-value heads, the vocabulary and the sequence, whether pp divides the layers and
    2·cp the sequence, ties, odd counts, grouped heads, whether gradients are accumulated, how documents are packed,
    masked, blended and read by workers, evaluation, the optimizer and its formats, compiled blocks.
    """
    layout, changes = _layout(job.layout)
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
    changes += _of_sizes(job, model, sequence, accumulation)
    data, data_changes = _data(job, step_tokens=small["batch"]["global_batch"] * sequence)
    small["data"] |= data
    changes += data_changes
    evaluate_every = steps
    if is_asynchronous(job):
        # A stage's first update shows in its forward up to pp steps later; then the pipeline empties and fills again.
        evaluate_every = layout.pp + 1
        steps = max(steps, evaluate_every + layout.pp)
        changes.append(Change(f"{STALE_REFERENCE}, over {steps} steps"))
    # All held-out sequences; packed differently there may be as many as tokens.
    held_out = HELD_OUT if job.data.packing == "concatenate" else HELD_OUT * sequence
    evaluates = job.evaluation.every_steps > 0 and job.data.validation_fraction > 0
    small["evaluation"] |= {"every_steps": evaluate_every if evaluates else 0, "batches": held_out, "sample_tokens": 0}
    if job.evaluation.sets:
        small["evaluation"]["sets"] = {}
        changes.append(Change(f"evaluation.sets {', '.join(job.evaluation.sets)} are left out", hides=True))
    warmup = min(job.warmup_steps, 1)
    small["schedule"] |= {"warmup_steps": warmup, "decay_steps": min(job.decay_steps, 1, steps - warmup)}
    small["optimizer"] |= {"lr": 1e-3, "eps": 1e-3}
    changes.append(
        Change("optimizer: lr 1e-3 and eps 1e-3, so that rounding in gradients that are zero is not amplified")
    )
    small["precision"] |= {"compute": "fp32", "gradients": "fp32"}
    small["run"] |= {"steps": steps, "device": "cpu", "on_bad_step": "keep", "folder": None}
    changes += _of_device(job, layout, device)
    for section in ("checkpoint", "cluster", "log"):
        del small[section]
    if isinstance(job.memory.recompute, Segments) and job.memory.recompute.segments > MOST_SEGMENT:
        small["memory"]["recompute"] = Segments(segments=MOST_SEGMENT)
        changes.append(Change(f"memory.recompute {job.memory.recompute} → segments of {MOST_SEGMENT}"))
    if isinstance(job.memory.recompute, Budget):
        small["memory"]["recompute"] = "none"
        small["memory"]["recompute"] = _budget(job, job.memory.recompute, Job.model_validate(small))
        changes.append(Change("memory.recompute: the same share between all blocks recomputed and none"))
    return Job.model_validate(small), changes


def _of_sizes(job: Job, small: dict[str, Any], sequence: int, accumulation: int) -> list[Change]:
    shape = job.model
    changes = [
        Change(
            f"model shrunk: width {shape.width} → {small['width']}, layers {shape.layers} → {small['layers']}, "
            f"heads {shape.heads}/{shape.kv_heads} → {small['heads']}/{small['kv_heads']}, vocabulary "
            f"{shape.vocab_size} → {small['vocab_size']}, sequence {job.batch.sequence_length} → {sequence}, "
            f"accumulation {job.accumulation} → {accumulation}"
        )
    ]
    if shape.experts is not None:
        changes.append(Change(f"model.experts: {words(shape.experts, small['experts'])}"))
        if shape.experts.force_balance:
            text = "model.experts.force_balance true → false, as what it gives an expert depends on the layout"
            changes.append(Change(text, hides=True))
    if shape.adapter is not None:
        changes.append(Change(f"model.adapter.rank {shape.adapter.rank} → {RANK}"))
    if (encoder := shape.encoder) is not None:
        changes.append(Change(f"model.{encoder.section}: {encoder_words(encoder, small[encoder.section])}"))
    if shape.init_from is not None:
        changes.append(Change(f"model.init_from {shape.init_from} → weights drawn at random"))
    return changes


def _of_device(job: Job, layout: Layout, device: str) -> list[Change]:
    """What the check's device does differently from a GPU."""
    changes = []
    if job.precision.format == "tf32":
        changes.append(Change('precision.compute "tf32" → the format of the check', hides=True))
    if job.run.compiles and device == "cpu":
        changes.append(Change("run.compile: blocks are compiled for the CPU"))
    if runs_plainly(layout, device):
        changes.append(Change(f"layout.async_tp: {PLAINLY}", hides=True))
    if job.memory.offload and device == "cpu":
        shown = ", ".join(job.memory.offload)
        changes.append(Change(f"memory.offload {shown}: nothing leaves the device, which is the host here", hides=True))
    return changes


def _data(job: Job, step_tokens: int) -> tuple[dict[str, Any], list[Change]]:
    """Text in memory in place of the job's, read, packed, masked and blended as the job does it."""
    data = job.data
    some = "" if data.format == "text" else ", with some tokens masked out of the loss"
    pairs = ", every two a pair" if data.format == "preferences" else ""
    changes = [Change(f"text: synthetic documents of unequal length{some}{pairs}")]
    workers = min(data.workers, MOST_WORKERS)
    if workers != data.workers:
        changes.append(Change(f"data.workers {data.workers} → {workers}"))
    if data.stream:
        changes.append(Change("data.stream → text in memory", hides=True))
    stages = [stage.model_dump() | {"tokens": (number + 1) * step_tokens} for number, stage in enumerate(data.stages)]
    if stages:
        changes.append(Change("data.stages: each begins a step after the one before"))
    if job.model.encoder is not None:
        changes.append(Change(f"{job.model.encoder.items}: noise, a different number of items in every sequence"))
    if data.fields:
        changes.append(Change(f"data.fields {', '.join(data.fields)}: nothing is read or decoded", hides=True))
    return {
        "sources": ("builtin:synthetic",) * len(data.sources),
        "tokenizer": None,
        "stream": False,
        "join": None,
        "fields": {},
        "items_per_sequence": None,
        "encoder": None,
        "decode": "cpu",
        "stages": stages,
        "workers": workers,
        "validation_fraction": min(data.validation_fraction, 0.01),
    }, changes


def _budget(job: Job, budget: Budget, small: Job) -> Budget:
    """The budget that leaves a small job the same share of memory."""
    spans = [budget_span(each, table_of(each) if each.layout.pp > 1 else None) for each in (job, small)]
    (least, most), (small_least, small_most) = spans
    share = min(1.0, (budget.budget_gib * 2**30 - least) / max(1, most - least))
    return Budget(budget_gib=(small_least + max(0.0, share) * (small_most - small_least) + 1) / 2**30)


def _layout(layout: Layout) -> tuple[Layout, list[Change]]:
    degrees = {axis: _degree(getattr(layout, axis)) for axis in AXES}
    for fewer in (2, 1):
        for axis in AXES:
            if prod(degrees.values()) > MOST_RANKS and degrees[axis] > fewer:
                degrees[axis] = fewer
    changes = [
        Change(f"layout.{axis} {getattr(layout, axis)} → {degree}", hides=degree == 1)
        for axis, degree in degrees.items()
        if degree != getattr(layout, axis)
    ]
    ep = small_ep(layout, degrees)
    if ep != layout.ep:
        changes.append(Change(f"layout.ep {layout.ep} → {ep}", hides=ep == 1))
    held = layout.virtual_stages
    virtual = None if held is None or degrees["pp"] == 1 else _degree(held)
    if virtual != held:
        changes.append(Change(f"layout.virtual_stages {held} → {virtual}", hides=virtual is None))
    split = None
    if layout.split is not None and (degrees["pp"], virtual) == (layout.pp, held):
        split = _ranked(layout.split)
        changes.append(Change(f"layout.split {list(layout.split)} → {list(split)}"))
    elif layout.split is not None:
        changes.append(Change(f"layout.split {list(layout.split)} → balanced, for fewer stages", hides=True))
    if layout.compress_after > 1:
        changes.append(Change(f"layout.compress_after {layout.compress_after} → 1"))
    first = {"compress_after": min(layout.compress_after, 1)}
    small = layout.model_copy(update=degrees | {"ep": ep, "virtual_stages": virtual, "split": split} | first)
    if is_lossy(layout):
        compression, change = _compression(small)
        small = small.model_copy(update=compression)
        changes.append(change)
    return small, changes


def _ranked(split: Sequence[int]) -> tuple[int, ...]:
    """Small numbers in the same order of size, equal where they were; 0 stays 0."""
    sizes = sorted({0, *split})
    return tuple(sizes.index(layers) for layers in split)


def _compression(layout: Layout) -> tuple[dict[str, Any], Change]:
    """How a lossy compression is checked, and what that changes."""
    was = f'layout.compress "{layout.compress}"'
    if layout.dp_replicate == 1:
        return {"compress": "none"}, Change(f'{was} → "none", as no replicas are left', hides=True)
    if only_replicates(layout):
        return {}, Change(COMPRESSED_REFERENCE)
    return LOSSLESS, Change(f'{was} → "topk" with compress_ratio 1.0, which loses nothing', hides=True)


def _accumulation(job: Job, layout: Layout) -> int:
    """A few micro-batches, plus as many as the pipeline's schedule needs."""
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


def _degree(degree: int) -> int:
    """Up to MOST_DEGREE it stays; more becomes that where it is even and 3 where it is odd."""
    return degree if degree <= MOST_DEGREE else MOST_DEGREE if degree % 2 == 0 else 3


def _model(job: Job, layout: Layout, sequence: int) -> dict[str, Any]:
    shape, was = job.model, job.layout
    heads, kv_heads = _heads(job, layout)
    nf4 = shape.adapter is not None and shape.adapter.base == "nf4"  # a row then consists of whole blocks
    head_dim = BLOCK if nf4 else 8 if heads <= 6 else 4
    as_wide_as_heads = shape.heads * shape.head_dim == shape.width
    stages_before, stages = _stages(was, job.accumulation), _stages(layout, _accumulation(job, layout))
    least, tp_divides = 1 if shape.layers == 1 else max(2, stages), (was.tp, layout.tp)
    if isinstance(job.memory.recompute, Segments) and job.memory.recompute.segments > 1:
        several = shape.layers // stages_before > job.memory.recompute.segments
        least = min(shape.layers, stages * (MOST_SEGMENT + several))
    window, wider = shape.sliding_window, (heads + 1) * head_dim
    layers = sum(layout.split or ()) or _alike(least, shape.layers, (2, 2), (stages_before, stages))
    return shape.model_dump() | {
        "preset": None,
        "init_from": None,
        "adapter": None if shape.adapter is None else _small_adapter(shape.adapter),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "width": heads * head_dim if as_wide_as_heads else wider if nf4 else _alike(wider, shape.width, tp_divides),
        "ffn_width": (BLOCK if nf4 else 20) * layout.tp,
        "layers": layers,
        "experts": small_experts(job, layout, layers),
        "latent": small_latent(shape.latent, head_dim, shape.value_dim == shape.head_dim),
        **({shape.encoder.section: small_encoder(shape.encoder, was.tp, layout.tp)} if shape.encoder else {}),
        "vocab_size": _alike(50, shape.vocab_size, (2, 2), tp_divides),
        "max_sequence_length": sequence + (0 if shape.max_sequence_length == job.batch.sequence_length else 5),
        "sliding_window": None if window is None else 7 if window < job.batch.sequence_length else 2 * sequence,
    }


def _small_adapter(adapter: Adapter) -> dict[str, Any]:
    """With a small rank, and the same scale."""
    alpha = adapter.scale * (sqrt(RANK) if adapter.rslora else RANK)
    return adapter.model_dump() | {"rank": RANK, "alpha": alpha, "init_from": None}


def _heads(job: Job, layout: Layout) -> tuple[int, int]:
    """Query and key-value heads: the same answer to whether tp divides the latter, and the same kind of grouping."""
    shape, tp = job.model, layout.tp
    spreads = layout.cp_method == "ulysses"  # then cp must divide the heads of a tensor-parallel rank, and did
    cp_before, cp = (job.layout.cp, layout.cp) if spreads else (1, 1)
    if shape.kv_heads % job.layout.tp:
        kv_heads = _uneven(shape.kv_heads, job.layout.tp, tp)
    else:
        held = shape.kv_heads // job.layout.tp
        kv_heads = tp * (_uneven(held, cp_before, cp) if held % cp_before else cp * min(2, held // cp_before))
    grouping = _few(shape.heads // shape.kv_heads)
    while kv_heads * grouping % (tp * cp):
        grouping += 1
    return kv_heads * grouping, kv_heads


def _uneven(heads: int, parts_before: int, parts: int) -> int:
    """Heads that do not divide by the parts: fewer of which the parts are a multiple, or more of which they are not."""
    return 1 if parts_before % heads == 0 else parts + 1


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
