"""A rehearsal in sentences: which rank it was, what did not fit, and the result in one line."""

from meshwright.amounts import size
from meshwright.rehearse.result import Rehearsal, RehearsedRank

_KINDS = {
    "weights": ("weights", "working weights", "weights in fp8", "gathered parameters"),
    "gradients": (
        "gradients",
        "gradients before they are reduced",
        "gradients in the other format",
        "a bucket of gradients",
    ),
    "optimizer states": ("optimizer states",),
    "activations": (
        "activations",
        "a block's forward recomputed",
        "a block's backward",
        "logits and loss",
        "final norm",
        "sent and kept until the step ends",
    ),
}
"""The planner's terms by the kind of memory that a rehearsal measures; all others are "other"."""


def planned_kinds(terms: dict[str, float]) -> dict[str, float]:
    """The planned terms summed by the kinds of memory that a rehearsal measures."""
    kind_of = {term: kind for kind, terms_of_kind in _KINDS.items() for term in terms_of_kind}
    kinds: dict[str, float] = {}
    for term, planned in terms.items():
        kind = kind_of.get(term, "other")
        kinds[kind] = kinds.get(kind, 0.0) + planned
    return kinds


def rank_words(rank: RehearsedRank, world: int) -> str:
    """`rank 12 of 64 (last stage)`; without a pipeline only the rank."""
    return f"rank {rank.rank} of {world}" + (f" ({rank.place})" if rank.place else "")


def plan_error(measured: float, planned: float | None) -> str:
    """The plan's error as everywhere else, relative to what was measured: `+1.2%` if the plan is too high; empty if
    one of the two is missing."""
    return f"{planned / measured - 1:+.1%}" if planned and measured else ""


def shortage(rank: RehearsedRank, rehearsal: Rehearsal) -> str:
    """What a rank that ran out of memory needs, and what to lower."""
    where = f"a GPU of {rehearsal.cluster}" if rehearsal.cluster else "this device"
    needs = f"{size(rank.needed_bytes)}, more than {where} has" if rank.needed_bytes else f"more than {where} has"
    if rank.memory is None:
        needs += " and perhaps more still, as it got no further"
    elif rank.memory.planned_bytes:
        needs += f" (planned: {size(rank.memory.planned_bytes)})"
    return f"{rank_words(rank, rehearsal.world)} needs {needs}; {_fragments(rank) or _remedy(rank)}"


def _fragments(rank: RehearsedRank) -> str:
    """What to do if there was enough memory, but in pieces; empty if there was too little."""
    if not rank.asked_bytes or (rank.idle_bytes or 0) < rank.asked_bytes:
        return ""
    return (
        f"{size(rank.idle_bytes or 0)} were free in pieces, none as large as the {size(rank.asked_bytes)} asked for: "
        "set PYTORCH_ALLOC_CONF=expandable_segments:True"
    )


def _remedy(rank: RehearsedRank) -> str:
    """What to lower: by what the plan says is largest."""
    kinds = {} if rank.memory is None else planned_kinds(rank.memory.planned_terms)
    terms = {} if rank.memory is None else rank.memory.planned_terms
    kept = kinds.get("activations", 0.0)
    states = sum(kinds.get(kind, 0.0) for kind in ("weights", "gradients", "optimizer states"))
    if kinds and states > kept:
        return "raise layout.zero, dp_shard, tp or pp, or set memory.offload"
    if terms.get("logits and loss", 0.0) > kept / 2:
        return "lower batch.micro_batch, raise layout.tp, or give its stage fewer layers with layout.split"
    return 'lower batch.micro_batch or batch.sequence_length, or set memory.recompute = "full"'


def summary(rehearsal: Rehearsal) -> str:
    """The result in one line, for a list of runs."""
    failed = [rank for rank in rehearsal.ranks if rank.state == "out of memory"]
    if failed:
        return f"out of memory: {shortage(failed[0], rehearsal)}"
    measured = [(rank, rank.memory) for rank in rehearsal.ranks if rank.memory is not None]
    if not measured:
        return "nothing was measured"
    rank, memory = max(measured, key=lambda one: one[1].allocated_bytes)
    told = f"{size(memory.allocated_bytes)} on {rank_words(rank, rehearsal.world)}"
    if memory.planned_bytes:
        told += f", planned {size(memory.planned_bytes)} ({plan_error(memory.allocated_bytes, memory.planned_bytes)})"
    step = rehearsal.step
    if step is None:
        return f"{told}; {seconds(rank.step_s)} of compute per step"
    share = f", {step.measured_s / step.step_s:.0%} of it measured" if step.step_s > 0 else ""
    return f"{seconds(step.step_s)} per step{share}; {told}"


def seconds(value: float) -> str:
    """A step's or a phase's time: `3.21 s`, `12.4 ms`."""
    if abs(value) >= 1:
        return f"{value:.3g} s" if abs(value) < 1000 else f"{value:,.0f} s"
    return f"{1e3 * value:.3g} ms"
