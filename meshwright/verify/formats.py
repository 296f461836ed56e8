"""Whether a layout computes in 16 or 8 bits what these formats can: bounds derived from the format, not chosen.

**One rounding.** A number format with unit roundoff u (bf16 2⁻⁸, fp16 2⁻¹¹, fp8's e4m3 2⁻⁴ and e5m2 2⁻³) changes an
entry by at most u of itself. Entries err independently, so a tensor as a whole, ‖a−b‖₂/‖b‖₂, errs by less: 0.39 u where
entries spread evenly over binades. Products are added up in fp32, whose u of 2⁻²⁴ is negligible.

**Many roundings.** The squares of independent errors add up: after R roundings √R · 0.39 u are expected, and √R · u
is allowed, as if each were the worst case. R is counted on the longest path through the model. A block
rounds 12 results on its way forward (norm, projection, rotation, attention, projection, sum; norm, gate, activation,
product, projection, sum) and reads 6 rounded weights; backward rounds as many gradients and reads the same weights: 18
roundings each way. The ends (embedding, last norm, head, logits; their gradients) are 4 each way. Sums over
tensor-parallel ranks are computed in the compute format: 2 in a block each way, of tp terms. fp8 rounds both operands
of a block's 4 products too, forward in e4m3, backward the gradient in e5m2 and the other in e4m3; with scales of rows
or blocks the gradient is e4m3 as well. Finer scales do not lower u: they keep small numbers from vanishing. A head
in fp8 is one more product each way, with one scale per tensor.

**What is allowed.**

gradient    2 √R · u for each parameter: they differ by about 2 in how much of the path they see and how many they are
norm        0.39 √R · u: of the error that is expected of all gradients, a norm sees only the part along them
loss        √R · u / √T with the roundings of the forward pass, for the mean of T tokens with independent errors
update      as gradients, plus what the optimizer's states round. AdamW has eps 1 here, where an update follows its
            gradient smoothly: with a small eps it is nearly the gradient's sign, which is arbitrary for small entries.
            A clipped gradient gets a higher rate instead, or fp32 could not hold the weight and the change of it;
            what each step's sum of both loses, 2⁻²⁴ of the weight, is allowed besides.
            Lion's update is a sign: of entries that are normally distributed, a share ε/π changes it if they err by ε,
            and each then by 2; a tensor's few entries differ from that share by chance, as three of them: of twenty
            and fewer, that may be anything.
            Muon and Adafactor have no such setting; their updates get only the second check.
pairs       of answers have losses of small differences of large sums, which `pair_sizes` derives.

A bound of 1 would allow anything, so no bound is above 0.9.

**A second check** is tighter than what must hold for all models. One process in the same format makes errors of the
same kind; a layout's may be at most 3 times as large for one tensor (few entries spread widely) and twice for all
parameters together. Both are made: the first detects a bug that one process has too.

**Sensitivity.** Keys of sharp attention and sums that nearly cancel err by more than the path explains. Where a
tensor exceeds its bound, `sensitivity` measures how strongly it responds to rounding, in float64.

**Experts.** A token whose scores for two experts are close goes to either of them after rounding, so such a run is
given the choices of one process in float64 (`replay`). Its own routers' choices are compared with these: at most
2 √R · u of them may differ, with the roundings of the forward pass (in bf16 about 5%, where up to 0.4% were seen).

**Sums in fp32** show in their bits: a sum of two or more 16-bit gradients has entries that 16 bits cannot hold. If
nearly all fit, the sum was computed in 16 bits; its error would be lost in that of the backward pass.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from meshwright.job import Job
from meshwright.layout import FP8_MULTIPLE
from meshwright.model.numbers import DTYPES
from meshwright.verify.compare import Comparison, Kind, differences, series_errors, series_rows, zero_gradients
from meshwright.verify.compressed import is_lossy
from meshwright.verify.documents import HELD_OUT
from meshwright.verify.observe import Observation, Shard
from meshwright.verify.pair_sizes import PairSizes
from meshwright.verify.replay import Replayed

UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-8}
"""Unit roundoff of what is kept in memory, by precision.compute; fp8 is bf16 but for its products."""
FORWARD_UNIT, GRADIENT_UNIT = 2.0**-4, 2.0**-3
"""Of fp8's operands: e4m3, and e5m2 for gradients with one scale per tensor."""
BLOCK_ROUNDINGS, END_ROUNDINGS, PRODUCTS, TP_SUMS = 18, 4, 4, 2
"""Of the longest path, in one direction: through a block, at the ends; products of a block; its sums over tp."""
MASTER_UNIT = 2.0**-24
"""Of the masters, which are fp32."""
EXPECTED, TENSOR_FACTOR, LARGEST = 0.39, 2.0, 0.9
STATE_UNITS = {"fp32": 0.0, "bf16": 2.0**-7, "int8": 3 / 127}
"""What keeping a moment changes: a dithered rounding by a whole unit, in 8 bits of a block's largest entry."""
TIMES_ALONE, TIMES_ALONE_TOGETHER = 3.0, 2.0
"""How much larger than one process's own the error of a tensor, and of all together, may be."""
MOST_NARROW = 0.9
"""Share of a sum's entries that may fit 16 bits; of correct sums of two a third do (measured)."""
FEW_CHOICES = 3
"""Of a check with few tokens, how many may differ in any format."""
SERIES: dict[Kind, str] = {"loss": "losses", "norm": "norms", "evaluation": "evaluations", "margin": "margins"}
TENSORS: dict[Kind, str] = {"gradient": "gradients", "update": "updates"}
ALL = "all parameters"
HEAD_MULTIPLE = 8
"""Of a head's width and of experts' sides, for the kernels of GPUs."""
SCORE_MATRICES = ("q", "k", "q_down", "k_rope")
"""Projections on which only the scores of attention depend."""
SMOOTH = {"lr": 1e-2, "eps": 1.0}
FEW_SIGNS = 3
"""Entries of a tensor whose sign may change by chance, however few are expected to."""


def own_format(job: Job) -> str | None:
    """The format in which a job must be checked besides float64; None where it computes in 32 bits."""
    return job.precision.format if job.precision.format in UNITS else None


def with_precision(small: Job, job: Job, name: str) -> Job:
    """A shrunk job that computes in a format and sums gradients as the job does."""
    precision = {"compute": name, "gradients": job.precision.gradients}
    return small.model_copy(update={"precision": small.precision.model_copy(update=precision)})


def in_format(job: Job, name: str) -> tuple[Job, list[str]]:
    """A small job as it is checked in a format, and a note for each change."""
    notes = []
    changed: dict[str, Any] = {"precision": job.precision.model_copy(update={"compute": name})}
    if _follows_gradients(job):
        rate = SMOOTH["lr"] / min(1.0, job.optimizer.clip or 1.0)
        changed["optimizer"] = job.optimizer.model_copy(update=SMOOTH | {"lr": rate})
        notes.append(
            f"{name}: optimizer with lr {rate:.3g} and eps 1, so that an update's error follows its gradient's"
        )
    job, without = without_compression(job, name)
    notes += without
    if name == "fp16":
        notes.append("fp16: the loss scale starts at 2^10, since gradients are large in small models")
    job = job.model_copy(update=changed)
    if (wide := _widened(job)) != job:
        job = wide
        notes.append(
            f"{name}: sizes rounded to multiples that its kernels accept: width {job.model.width}, head_dim "
            f"{job.model.head_dim}, feed-forward {job.model.ffn_width}, sequence {job.batch.sequence_length}"
        )
    return job, notes


def without_compression(job: Job, name: str) -> tuple[Job, list[str]]:
    """A job that sends gradients exactly, and a note if it did not: rounding would change what is left out."""
    if not is_lossy(job.layout):
        return job, []
    note = (
        f'{name}: layout.compress "{job.layout.compress}" → "none", because what it leaves out would hide other errors'
    )
    return job.model_copy(update={"layout": job.layout.model_copy(update={"compress": "none"})}), [note]


def compare_formats(ranks: Sequence[Observation], alone: Observation, exact: Observation, job: Job) -> list[Comparison]:
    """The ranks' run in the job's format against float64, by the bounds above and by one process in the format."""
    forward, backward = _variance(job)
    path = math.sqrt(forward + backward)
    states = STATE_UNITS[job.precision.optimizer_states]
    pairs = PairSizes.of(job, exact)
    factor = 0.0 if pairs is None else pairs.factor_error(exact.losses[0], math.sqrt(forward))
    of_tensors = TENSOR_FACTOR * math.hypot(path, factor)
    rows = []
    for kind, field in SERIES.items():
        expected = getattr(exact, field)
        floor = pairs.margin_size if pairs is not None and kind == "margin" else 0.0
        errors = series_errors([getattr(rank, field) for rank in ranks], expected, floor)
        bounds = _series_bounds(kind, job, expected, exact.losses, pairs)
        pairs_of = zip(series_rows(kind, errors, None), bounds, strict=True)
        rows += [replace(row, bound=_below_all(bound)) for row, bound in pairs_of]
    zeros = zero_gradients(exact)
    of_updates = math.hypot(of_tensors, states) if _follows_gradients(job) else None
    rows += _tensors(
        "gradient", [rank.gradients for rank in ranks], alone.gradients, exact.gradients, zeros, of_tensors
    )
    seen = [rank.updates for rank in ranks]
    if job.optimizer.name == "lion":
        chances = {name: _changed_signs(of_tensors, shard.values.numel()) for name, shard in exact.updates.items()}
        chances[ALL] = _changed_signs(of_tensors, sum(shard.values.numel() for shard in exact.updates.values()))
        rows += _tensors("update", seen, alone.updates, exact.updates, zeros, None, chances, signs=True)
    else:
        rows += _tensors("update", seen, alone.updates, exact.updates, zeros, of_updates, _resolutions(exact, job))
    rows += _sums(job, [rank.gradients for rank in ranks])
    return [replace(row, format=job.precision.format) for row in rows]


def _series_bounds(
    kind: Kind, job: Job, expected: Sequence[float], losses: Sequence[float], pairs: PairSizes | None
) -> list[float]:
    """The bound of every number of a series."""
    forward, backward = _variance(job)
    held_out, step = HELD_OUT * job.batch.sequence_length, job.batch.global_batch * job.batch.sequence_length
    if pairs is None:
        tokens = held_out if kind == "evaluation" else step
        bound = EXPECTED * math.sqrt(forward + backward) if kind == "norm" else math.sqrt(forward / tokens)
        return [bound] * len(expected)
    unit = math.sqrt(forward)
    if kind == "margin":
        return [unit] * len(expected)
    if kind == "norm":
        path = EXPECTED * math.sqrt(forward + backward)
        return [math.hypot(path, pairs.factor_error(loss, unit)) for loss in losses]
    return [pairs.loss_error(loss, unit) for loss in expected]


def routing_row(job: Job, dtype: str, replayed: Replayed) -> Comparison:
    """The share of replayed choices that the layout's own routers would not have made.

    Scores err as gradients do, and as large a share of tokens is at most that close to another expert.
    """
    narrow = dtype in UNITS
    share = TENSOR_FACTOR * math.sqrt(_variance(job)[0]) if narrow else 0.0
    bound = _below_all(max(share, FEW_CHOICES / replayed.choices))
    error = replayed.differing / replayed.choices
    return Comparison("routing", "all layers", error, bound, format=job.precision.format if narrow else "")


def _variance(job: Job) -> tuple[float, float]:
    """Σ u² over the roundings on the longest path forward, and over those of the backward."""
    layers, layout, unit = job.model.blocks, job.layout, UNITS[job.precision.format]
    roundings = layers * BLOCK_ROUNDINGS + END_ROUNDINGS
    if layout.tp > 1:
        roundings += layers * TP_SUMS * layout.tp
    forward = backward = roundings * unit**2
    if job.precision.format == "fp8":
        forward += layers * PRODUCTS * 2 * FORWARD_UNIT**2
        gradient = GRADIENT_UNIT if job.precision.fp8_scales == "tensor" else FORWARD_UNIT
        backward += layers * PRODUCTS * (gradient**2 + FORWARD_UNIT**2)
        if job.precision.fp8_head:
            forward += 2 * FORWARD_UNIT**2
            backward += GRADIENT_UNIT**2 + FORWARD_UNIT**2
    if job.precision.gradients == "bf16":
        backward += _summands(job, parts=job.layout.cp) * UNITS["bf16"] ** 2
    return forward, backward


def _tensors(
    kind: Kind,
    ranks: list[dict[str, Shard]],
    alone: dict[str, Shard],
    exact: dict[str, Shard],
    zeros: Collection[str],
    bound: float | None,
    chances: Mapping[str, float] = MappingProxyType({}),
    signs: bool = False,
) -> list[Comparison]:
    """A row for each parameter, and one for all together.

    `chances` are relative errors that say nothing, whatever one process errs by: where they could be anything, there is
    no bound. Of `signs`, nothing else is allowed.
    """
    wholes = {name: shard.values for name, shard in exact.items()}
    off = {name: differences([held[name] for held in ranks if name in held], whole) for name, whole in wholes.items()}
    off_alone = {name: differences([alone[name]], whole)[0] for name, whole in wholes.items()}
    size, everything = sum(whole.numel() for whole in wholes.values()), _norm(wholes.values())
    # What is mathematically zero is measured against a parameter of that size with entries like all others.
    usual = {name: everything * math.sqrt(whole.numel() / size) for name, whole in wholes.items()}
    scales = {name: usual[name] if name in zeros else float(whole.norm()) for name, whole in wholes.items()}
    errors_alone = {name: float(found.norm()) / scales[name] for name, found in off_alone.items()}
    middle = median(errors_alone.values())

    def row(name: str, error: float, calibrated: float, note: str = "") -> Comparison:
        chance = chances.get(name, 0.0)
        if chance > LARGEST:
            return Comparison(kind, name, error, None, note)
        derived = None if bound is None else math.hypot(bound, chance)
        return Comparison(kind, name, error, _below_all(derived, max(calibrated, chance)), note)

    together = TIMES_ALONE_TOGETHER * _norm(off_alone.values()) / everything
    rows = [row(ALL, _norm(found for found, _ in off.values()) / everything, together)]
    for name, (found, note) in off.items():
        calibrated = 0.0 if signs else TIMES_ALONE * max(errors_alone[name], middle)
        rows.append(row(name, float(found.norm()) / scales[name], calibrated, note))
    return rows


def _resolutions(exact: Observation, job: Job) -> dict[str, float]:
    """How far fp32 masters may be off their updates, relative to these: every step rounds the sum of both."""
    rounded = job.run.steps * MASTER_UNIT
    errors = {name: rounded * size for name, size in exact.sizes.items()}
    updates = {name: float(shard.values.norm()) for name, shard in exact.updates.items()}
    resolutions = {name: error / updates[name] if updates[name] else math.inf for name, error in errors.items()}
    return resolutions | {ALL: math.hypot(*errors.values()) / math.hypot(*updates.values())}


def _changed_signs(gradient: float, entries: int) -> float:
    """The error of signs of entries that err by a bound, relative to all signs."""
    return 2 * math.sqrt(gradient / math.pi + FEW_SIGNS / entries)


def _sums(job: Job, ranks: list[dict[str, Shard]]) -> list[Comparison]:
    """The share of entries that 16 bits hold, of the gradients of matrices that are sums and should be computed in
    fp32."""
    if job.precision.gradients != "fp32" or job.layout.compress != "none":
        return []
    rows = []
    names = dict.fromkeys(name for held in ranks for name in held if name.startswith("layers."))
    # Elsewhere padding may be all that a rank has of a sequence, and its gradient zero.
    parts = job.layout.cp if job.data.packing == "concatenate" else 1
    for name in (name for name in names if _summands(job, name, parts) > 1 and not _may_be_idle(job, name)):
        values = torch.cat([held[name].values.flatten() for held in ranks if name in held])
        if any(held[name].values.dim() > 1 for held in ranks if name in held):
            rows.append(Comparison("sum", name, _share_of_narrow(values, DTYPES[job.precision.format]), MOST_NARROW))
    return rows


def _may_be_idle(job: Job, name: str) -> bool:
    """Whether some summands of a matrix may be zero: an extra token has no label at the end of a document, so that of
    short ones the first token alone has one, which sees nothing but itself and so gives queries and keys no gradient.
    """
    if not job.model.extra_tokens:
        return False
    _, layer, module, projection, *_ = name.split(".")
    return int(layer) >= job.model.layers and module == "attention" and projection in SCORE_MATRICES


def _share_of_narrow(values: Tensor, dtype: torch.dtype) -> float:
    """By the bits of the significand alone: gradients of fp16 are scaled, and its range is another matter."""
    bits = values[values != 0].float().view(torch.int32)
    below = 2**16 - 1 if dtype == torch.bfloat16 else 2**13 - 1
    return float(((bits & below) == 0).double().mean()) if len(bits) else 0.0


def _summands(job: Job, name: str = "", parts: int = 1) -> int:
    """How many gradients of a parameter are summed in a step, of so many parts of a sequence; tokens of several ranks
    meet in an expert's product."""
    layout = job.layout
    ranks = layout.dp_replicate * layout.dp_shard * parts
    return job.accumulation * (ranks * layout.tp // layout.ep if ".moe.experts." in name else ranks)


def _follows_gradients(job: Job) -> bool:
    """Whether a small change of a gradient is a small change of its update."""
    return job.optimizer.name in ("adamw", "sgd")


def _widened(job: Job) -> Job:
    """A job whose heads and experts 16-bit kernels accept, and for fp8 whose matrices the hardware can multiply."""
    model, layout, batch = job.model, job.layout, job.batch
    fp8 = job.precision.format == "fp8"
    head_dim, side = _up(model.head_dim, FP8_MULTIPLE if fp8 else HEAD_MULTIPLE), FP8_MULTIPLE * layout.tp if fp8 else 1
    as_wide_as_heads = model.heads * model.head_dim == model.width
    sequence = _up(batch.sequence_length, 2 * layout.cp * side)
    experts, width = model.experts, _up(model.width, side)
    if experts is not None:
        width = _up(width, HEAD_MULTIPLE)
        sizes = {"ffn_width": _up(experts.ffn_width, HEAD_MULTIPLE), "shared_width": _up(experts.shared_width, side)}
        experts = experts.model_copy(update=sizes)
    shape = {
        "head_dim": head_dim,
        "width": model.heads * head_dim if as_wide_as_heads else width,
        "ffn_width": _up(model.ffn_width, side),
        "max_sequence_length": max(model.max_sequence_length, sequence),
        "experts": experts,
    }
    longer = {"model": model.model_copy(update=shape), "batch": batch.model_copy(update={"sequence_length": sequence})}
    return job.model_copy(update=longer if fp8 else {"model": longer["model"]})


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _below_all(*bounds: float | None) -> float:
    return min(LARGEST, *(bound for bound in bounds if bound is not None))


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors))
