"""What a CPU's calls take beyond the operations they make: a step of a small decoder, measured, less its operations.

Modules, autograd, hooks of recomputation and of sharding: on a GPU the host does this work while the device computes.
"""

from collections.abc import Sequence
from functools import cache

from meshwright.cost import REPEATED, layer_elements
from meshwright.hardware.profile import Decoder
from meshwright.job import Job
from meshwright.plan.communication import Wires, all_gather_s, all_reduce_s, group_of, reduce_scatter_s
from meshwright.plan.compute import Work, block_work, embedding_work, head_work
from meshwright.plan.kernels import Device
from meshwright.plan.operations import Seconds
from meshwright.plan.software import Software

_NOTHING = (0.0, 0.0)
_MASTER_BYTES = 4.0


@cache
def block_calls_s(positions: str, device: Device, software: Software, mode: str) -> Seconds:
    """A block's calls, forward and backward, of models with such positions: Llama's and GPT-2's differ in all parts."""
    rows = _decoders(device, "full" if mode in REPEATED else mode, positions)
    if not rows:
        return _NOTHING
    return _beyond(_per_block(rows), block_work(_job(rows[0]), device, software, mode))


@cache
def ends_calls_s(positions: str, device: Device, software: Software) -> Seconds:
    """Calls outside the blocks."""
    rows = _decoders(device, "none", positions)
    if not rows:
        return _NOTHING
    small, (forward, backward) = _job(rows[0]), _per_block(rows)
    fewest = small.model.layers
    ends = rows[0].forward_s - fewest * forward, rows[0].backward_s - fewest * backward
    return _beyond(ends, embedding_work(small, device) + head_work(small, device, software))


@cache
def sharding_calls_s(zero: int, device: Device, wires: Wires) -> Seconds:
    """A block's hooks that gather parameters and reduce gradients; what they transfer is counted elsewhere."""
    sharded, alone = _decoders(device, "none", "rope", zero), _decoders(device, "none", "rope")
    if not sharded or not alone:
        return _NOTHING
    ranks = wires.gpus_per_node
    group, size = group_of(ranks, 1, ranks), _MASTER_BYTES * layer_elements(_job(alone[0])).total
    gather, scatter = all_gather_s(wires, group, size), reduce_scatter_s(wires, group, size)
    moved = {0: (0.0, all_reduce_s(wires, group, size)), 3: (gather, gather + scatter)}.get(zero, (gather, scatter))
    pairs = zip(_per_block(sharded), _per_block(alone), moved, strict=True)
    forward, backward = (max(0.0, whole - own - transfers) for whole, own, transfers in pairs)
    return forward, backward


def _decoders(device: Device, recompute: str, positions: str, zero: int | None = None) -> list[Decoder]:
    """The measured decoders of one kind, by their layers; empty unless there are two to compare."""
    rows = () if device.measured is None else device.measured.profile.decoders
    alike = [row for row in rows if (row.recompute, row.zero) == (recompute, zero)]
    found = [row for row in alike if _job(row).model.positions == positions]
    return sorted(found, key=lambda row: _job(row).model.layers) if len(found) > 1 else []


def _per_block(rows: Sequence[Decoder]) -> Seconds:
    few, many = rows[0], rows[-1]
    more = _job(many).model.layers - _job(few).model.layers
    return (many.forward_s - few.forward_s) / more, (many.backward_s - few.backward_s) / more


def _beyond(measured: Seconds, work: Work) -> Seconds:
    return max(0.0, measured[0] - work.forward), max(0.0, measured[1] - work.backward)


def _job(row: Decoder) -> Job:
    """The job that was measured, on one rank."""
    length = row.sequence_length
    return Job.model_validate(
        {
            "model": row.model,
            "batch": {"sequence_length": length, "global_batch": 1, "micro_batch": 1},
            "memory": {"recompute": row.recompute},
        }
    )
