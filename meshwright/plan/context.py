"""What context parallelism adds to a block's attention: transfers of keys and values, and results that are merged."""

from meshwright.job import Job
from meshwright.layout import kv_copies, kv_heads_of
from meshwright.plan.communication import Group, Wires, all_gather_s, all_to_all_s
from meshwright.plan.compute import tokens_of
from meshwright.plan.kernels import Device, memory_s

_MERGED_BYTES = 26.0
"""Moved for each entry of a block's result that is merged in 32 bits: scaled, and added to the scaled sum so far."""
_ADDED_BYTES = 10.0
"""Moved for each entry of a gradient that is added to its sum in 32 bits."""
_MET = 0.75
"""Of a zigzag slice's queries, or keys, the share that takes part in another rank's block: half of one, all of the
other."""
_GRADIENT_BYTES = 4
"""Of a key's or value's gradient on its way, whatever the compute format is."""


def context_s(
    job: Job, wires: Wires, group: Group, attention_s: tuple[float, float], contention: float
) -> tuple[float, float]:
    """What transfers add to a block's forward and backward, beside attention that takes `attention_s`; while a ring's
    are hidden behind it, `contention` is the share that it slows down by."""
    layout, model, ranks = job.layout, job.model, job.layout.cp
    if ranks == 1:
        return 0.0, 0.0
    tokens, heads, kv_heads = tokens_of(job), model.heads // layout.tp, kv_heads_of(job)
    if layout.cp_method == "ulysses":  # queries, keys and values to their heads' ranks, and the result back
        moved = job.precision.number_bytes * tokens * (2 * heads + 2 * kv_heads * kv_copies(job)) * model.head_dim
        once = all_to_all_s(wires, group, moved)
        return once, once
    keys = job.precision.number_bytes * 2 * tokens * kv_heads * model.head_dim
    transfers = all_gather_s(wires, group, keys * ranks)
    # Backward, keys and values travel again, and their gradients.
    forward, backward = transfers, (1 + _GRADIENT_BYTES / job.precision.number_bytes) * transfers
    if layout.cp_method == "ring":  # a block's keys travel during the attention over those before
        forward = _beside(forward, attention_s[0] * (ranks - 1) / ranks, contention)
        backward = _beside(backward, attention_s[1] * (ranks - 1) / ranks, contention)
    return forward, backward


def merged_s(job: Job, device: Device) -> tuple[float, float]:
    """What merging the results of several blocks of keys adds to a block's forward and backward."""
    blocks, tokens = job.layout.cp - 1, tokens_of(job)
    if not blocks or job.layout.cp_method == "ulysses":
        return 0.0, 0.0
    size = tokens * job.model.head_dim
    queries, keys = size * (job.model.heads // job.layout.tp), size * kv_heads_of(job)
    forward = blocks * memory_s(device, _MET * queries * _MERGED_BYTES, 3)
    return forward, blocks * memory_s(device, _MET * (queries + 2 * keys) * _ADDED_BYTES, 3)


def _beside(transfers: float, compute: float, contention: float) -> float:
    hidden = min(transfers, compute)
    return transfers - hidden + contention * hidden
