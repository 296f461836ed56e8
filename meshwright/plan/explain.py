"""Explains a search: what limits a layout, and why the nearest misses do not fit."""

from collections.abc import Sequence
from itertools import groupby
from math import log2
from typing import Any

from meshwright.cost import parameter_count
from meshwright.job import Job, Model
from meshwright.plan.error_bars import tied
from meshwright.plan.predict import Prediction
from meshwright.plan.search import SAFE, Candidate, Search

GIB = 2**30

# Tokens of a batch by parameters, as published: GPT-3's Table 2.1 (arXiv 2005.14165) and Llama 3 (arXiv 2407.21783).
_PRACTICE = (
    (1e9, 0.5e6, "GPT-3's models below 1B"),
    (5e9, 1e6, "GPT-3 1.3B and 2.7B"),
    (20e9, 2e6, "GPT-3 6.7B and 13B"),
    (200e9, 4e6, "GPT-3 175B (3.2M) and Llama 2 (4M)"),
    (float("inf"), 16e6, "Llama 3 405B"),
)


def usual_batch_tokens(parameters: float) -> tuple[int, str]:
    """Tokens per step that models of this size are trained with, and the source."""
    return next((int(tokens), where) for most, tokens, where in _PRACTICE if parameters < most)


_FINE_TUNING = 64
"""Sequences per step of a fine-tuning of all weights: Llama 2-Chat's (arXiv 2307.09288)."""
_ADAPTERS = 16
"""Sequences per step of adapters: those of QLoRA's Guanaco models, of 7B to 65B (arXiv 2305.14314)."""
_SMALL_MFU = 0.25
_SMALL_TOKENS = 8192
"""Tokens of a step per GPU below which a low MFU is the batch's fault."""


def usual_batch(model: Model, sequence: int) -> tuple[int, str]:
    """Tokens per step that such a model is trained with, from scratch or from weights, and the source."""
    if model.adapter is not None:
        where = "QLoRA's Guanaco models (arXiv 2305.14314): model.adapter is set"
        return _ADAPTERS * sequence, f"a batch of about {_ADAPTERS} sequences, as {where}"
    if model.init_from is not None:
        where = "Llama 2's fine-tuning (arXiv 2307.09288): model.init_from is set"
        return _FINE_TUNING * sequence, f"a batch of about {_FINE_TUNING} sequences, as {where}"
    usual, where = usual_batch_tokens(parameter_count(model))
    return sequence * 2 ** round(log2(usual / sequence)), f"a batch of about {usual / 1e6:g}M tokens, as {where}"


def batch_sequences(model: Model, sequence: int, gpus: int, batch_tokens: int | None) -> tuple[int, str]:
    """Sequences per step that the GPUs, or half of them and so on, share evenly, nearest to the requested tokens.

    Without a request it is the usual batch, with its source.
    """
    practice = ""
    if batch_tokens is None:
        batch_tokens, practice = usual_batch(model, sequence)
    wanted = max(1, round(batch_tokens / sequence))
    odd = gpus // (gpus & -gpus)
    share = odd if practice and odd <= wanted else 1  # by default a batch that three nodes can share
    while share * 2 <= min(wanted, gpus) and gpus % (share * 2) == 0:
        share *= 2
    each = max(1, round(wanted / share))
    return (2 ** round(log2(each)) if practice else each) * share, practice


def limit(prediction: Prediction) -> str:
    """What a step would gain most from: the largest phase that is not the model's own products and attention."""
    own = {"forward products", "forward attention", "backward products", "backward attention"}
    others = {name: seconds for name, seconds in prediction.phases.items() if name not in own}
    name = max(others, key=lambda each: others[each])
    share = others[name] / prediction.step_s
    return f"compute; next {name} {share:.0%}" if share < 0.1 else f"{name} {share:.0%}"


def layout_words(job: Job) -> str:
    """A layout in a line."""
    layout = job.layout
    parts = [f"dp {job.data_parallel}", f"zero {layout.zero_stage}"]
    if layout.dp_replicate > 1 and layout.zero_stage:
        parts[0] += f" ({layout.dp_replicate} replicas of {layout.dp_shard} shards)"
    degrees = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp}
    parts += [f"{name} {size}" for name, size in degrees.items() if size > 1]
    if layout.pp > 1:
        parts.append(layout.schedule + (f" ×{layout.virtual_stages}" if layout.virtual_stages else ""))
        if layout.split and len(set(layout.split)) > 1:
            parts.append(f"split {layers_in_words(layout.split)}")
    parts += [f"micro-batch {job.batch.micro_batch}", f"recompute {job.memory.recompute}"]
    if job.memory.offload:
        parts.append(f"offload {' and '.join(job.memory.offload)}")
    return ", ".join([*parts, *(["fp8"] if job.precision.format == "fp8" else [])])


def layers_in_words(split: tuple[int, ...]) -> str:
    """Layers per stage, equal neighbours together: `5×13 6×2 3`."""
    runs = [(count, len(list(same))) for count, same in groupby(split)]
    return " ".join(f"{count}×{times}" if times > 1 else str(count) for count, times in runs)


def simplest(best: Sequence[Candidate]) -> int | None:
    """Of the rows that tie with the fastest, the place of the simplest; None if there is one alone."""
    near = [place for place, tie in enumerate(tied(best)) if tie]
    if len(near) < 2:
        return None
    return min(near, key=lambda place: (_complexity(best[place].job), place))


def _complexity(job: Job) -> int:
    """How much there is to set up, understand and debug in a layout."""
    layout, recompute = job.layout, job.memory.recompute
    axes = 3 * (layout.tp > 1) + 3 * (layout.cp > 1) + 3 * (layout.ep > 1) + 4 * (layout.pp > 1)
    pipeline = 2 * (layout.schedule != "1f1b" and layout.pp > 1) + 2 * (layout.split is not None)
    sharding = (
        min(layout.zero_stage, 1) + (layout.zero_stage == 3) + 2 * bool(layout.zero_stage and layout.dp_replicate > 1)
    )
    memory = 0 if recompute == "none" else 1 if isinstance(recompute, str) else 3
    return axes + pipeline + sharding + memory + 4 * bool(job.memory.offload)


def small_batch(job: Job, prediction: Prediction, gpus: int) -> str:
    """That the batch is too small for so many GPUs, where a low MFU comes from it; else nothing."""
    tokens = job.tokens_per_step / gpus
    if prediction.mfu is None or prediction.mfu >= _SMALL_MFU or tokens >= _SMALL_TOKENS:
        return ""
    batch, sequence = job.batch.global_batch, job.batch.sequence_length
    wanted = max(1, round(_SMALL_TOKENS / sequence)) * gpus
    return (
        f"the batch is small for {gpus:,} GPUs: {batch} sequences of {sequence} tokens leave each {tokens:,.0f} tokens "
        f"a step, and the MFU is {prediction.mfu:.1%}; use fewer GPUs, or --batch-tokens {wanted * sequence} and more "
        "if training allows"
    )


def why_not(miss: Candidate, search: Search) -> str:
    """Why a faster layout was not chosen: by how much it is over, its largest terms, and what would make it fit."""
    rank = miss.prediction.fullest
    over = (rank.device - SAFE * miss.prediction.capacity_bytes) / GIB
    largest = sorted(rank.terms.items(), key=lambda term: -term[1])[:3]
    terms = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    changes = [change for one in search.best if (change := _one_change(miss.job, one.job))]
    remedy = f"; would fit with {changes[0]}" if changes else ""
    return f"{layout_words(miss.job)}: {over:.1f} GiB too much on pipeline rank {rank.rank} ({terms}){remedy}"


def _one_change(job: Job, other: Job) -> str | None:
    """The one setting that turns a layout into another, if one does."""
    mine, theirs = _settings(job), _settings(other)
    different = [name for name in mine if mine[name] != theirs[name]]
    if len(different) != 1:
        return None
    [name], layout = different, other.layout
    if name == "layout.dp_shard":
        return f"layout.dp_shard = {layout.dp_shard}, layout.dp_replicate = {layout.dp_replicate}"
    return f"{name} = {theirs[name]}" if theirs[name] not in (None, ()) else f"{name} left out"


def _settings(job: Job) -> dict[str, Any]:
    layout = job.layout
    return {
        "layout.zero": layout.zero_stage,
        "layout.dp_shard": layout.dp_shard if layout.dp_replicate > 1 and layout.zero_stage else None,
        "layout.split": layout.split,
        "layout.tp": layout.tp,
        "layout.cp": layout.cp,
        "layout.ep": layout.ep,
        "layout.pp": layout.pp,
        "layout.schedule": layout.schedule + (f" of {v} stages a rank" if (v := layout.virtual_stages) else ""),
        "batch.micro_batch": job.batch.micro_batch,
        "memory.recompute": job.memory.recompute,
        "memory.offload": job.memory.offload,
        "precision.compute": job.precision.format,
    }
