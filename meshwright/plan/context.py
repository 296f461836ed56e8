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
_BACKWARD = 3.0
"""Bytes of the backward's transfers over the forward's: keys and values again, and their gradients in 32 bits."""


def context_s(
    job: Job, device: Device, wires: Wires, group: Group, attention_s: tuple[float, float], contention: float
) -> tuple[float, float]:
    """Seconds added to a block's forward and backward, beside attention that takes `attention_s`; while a ring's
    transfers are hidden behind it, `contention` is the share that it slows down by."""
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
    forward, backward = transfers, _BACKWARD * transfers
    if layout.cp_method == "ring":  # a block's keys travel during the attention over those before
        forward = _beside(forward, attention_s[0] * (ranks - 1) / ranks, contention)
        backward = _beside(backward, attention_s[1] * (ranks - 1) / ranks, contention)
    blocks, queries = ranks - 1, tokens * heads * model.head_dim
    forward += blocks * memory_s(device, _MET * queries * _MERGED_BYTES, 3)
    backward += blocks * memory_s(device, _MET * (queries + 2 * tokens * kv_heads * model.head_dim) * _ADDED_BYTES, 3)
    return forward, backward


def _beside(transfers: float, compute: float, contention: float) -> float:
    hidden = min(transfers, compute)
    return transfers - hidden + contention * hidden
