"""Explains a search: what limits a layout, and why the nearest misses do not fit."""

from math import log2
from typing import Any

from meshwright.job import Job
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


def batch_sequences(parameters: float, sequence: int, gpus: int, batch_tokens: int | None) -> tuple[int, str]:
    """Sequences per step that the GPUs, or half of them and so on, share evenly, nearest to the requested tokens.

    Without a request it is the usual batch, with its source.
    """
    practice = ""
    if batch_tokens is None:
        usual, where = usual_batch_tokens(parameters)
        practice = f"a batch of about {usual / 1e6:g}M tokens, as {where}"
        batch_tokens = sequence * 2 ** round(log2(usual / sequence))
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
    parts += [f"{name} {size}" for name, size in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp)) if size > 1]
    if layout.pp > 1:
        parts.append(layout.schedule + (f" ×{layout.virtual_stages}" if layout.virtual_stages else ""))
    parts += [f"micro-batch {job.batch.micro_batch}", f"recompute {job.memory.recompute}"]
    if job.memory.offload:
        parts.append(f"offload {' and '.join(job.memory.offload)}")
    return ", ".join([*parts, *(["fp8"] if job.precision.compute == "fp8" else [])])


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
    return f"{different[0]} = {theirs[different[0]]}" if len(different) == 1 else None


def _settings(job: Job) -> dict[str, Any]:
    layout = job.layout
    return {
        "layout.zero": layout.zero_stage,
        "layout.tp": layout.tp,
        "layout.cp": layout.cp,
        "layout.pp": layout.pp,
        "layout.schedule": layout.schedule + (f" of {v} stages a rank" if (v := layout.virtual_stages) else ""),
        "batch.micro_batch": job.batch.micro_batch,
        "memory.recompute": job.memory.recompute,
        "memory.offload": job.memory.offload,
        "precision.compute": job.precision.compute,
    }
