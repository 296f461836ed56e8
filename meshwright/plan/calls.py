"""What a CPU's calls take beyond the operations they make: a step of a small decoder, measured, less its operations.

Modules, autograd, hooks of recomputation and of sharding: on a GPU the host does this work while the device computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from meshwright.cost import REPEATED, layer_elements, stage_elements
from meshwright.hardware.profile import Decoder
from meshwright.job import Job
from meshwright.plan.compute import Work, block_work, embedding_work, head_work
from meshwright.plan.groups import Groups
from meshwright.plan.kernels import Device
from meshwright.plan.operations import Seconds
from meshwright.plan.software import Software

_NOTHING = (0.0, 0.0)


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


@dataclass(frozen=True)
class Sharing:
    """What a layout.zero adds to a micro-batch that gathers parameters and reduces gradients: hooks, copies to and from
    the buffers they travel in, the transfers, and waiting for the slower rank. Forward and backward."""

    block_s: Seconds
    """Of every block."""
    ends_s: Seconds
    """Of what is outside the blocks, which is shared too."""
    parameter_s: Seconds
    """Of every parameter."""

    def seconds(self, blocks: int, ends: bool, parameters: float) -> Seconds:
        """Of so many blocks, with so many parameters there and at the ends."""
        forward, backward = (
            blocks * each + ends * once + parameters * more
            for each, once, more in zip(self.block_s, self.ends_s, self.parameter_s, strict=True)
        )
        return forward, backward


def sharing_of(job: Job, device: Device, groups: Groups) -> Sharing | None:
    """What data parallelism adds on a CPU as its ranks measured it; None on a GPU, and for other groups of ranks."""
    ranks = groups.data.size
    if device.operations is None or device.measured is None or device.measured.profile.ranks != ranks or ranks == 1:
        return None
    plain = groups.data.nodes == 1 and 1 in (groups.shard.size, groups.replicate.size)
    return _measured_sharing(job.layout.zero_stage, device) if plain else None


@cache
def _measured_sharing(zero: int, device: Device) -> Sharing | None:
    """By what narrow and wide decoders take longer over all measured ranks than on each alone; None if not measured."""
    narrow, wide = _longer(zero, device, wide=False), _longer(zero, device, wide=True)
    if narrow is None or wide is None:
        return None
    (job, blocks, ends), (larger, larger_blocks, _) = narrow, wide
    size = layer_elements(job).total
    more = layer_elements(larger).total - size
    rates = [max(0.0, wider - less) / more for wider, less in zip(larger_blocks, blocks, strict=True)]
    outside = stage_elements(job, range(0), first=True, last=True).total
    block_s = [max(0.0, whole - rate * size) for whole, rate in zip(blocks, rates, strict=True)]
    ends_s = [max(0.0, whole - rate * outside) for whole, rate in zip(ends, rates, strict=True)]
    return Sharing((block_s[0], block_s[1]), (ends_s[0], ends_s[1]), (rates[0], rates[1]))


def _longer(zero: int, device: Device, *, wide: bool) -> tuple[Job, Seconds, Seconds] | None:
    """A decoder's job, and what sharing it adds to a block and outside the blocks; None if not measured."""
    shared = _decoders(device, "none", "rope", zero, wide=wide)
    alone = _decoders(device, "none", "rope", wide=wide)
    if not shared or not alone:
        return None
    job = _job(alone[0])
    per_block = [whole - own for whole, own in zip(_per_block(shared), _per_block(alone), strict=True)]
    both = shared[0].forward_s - alone[0].forward_s, shared[0].backward_s - alone[0].backward_s
    outside = [whole - job.model.layers * each for whole, each in zip(both, per_block, strict=True)]
    return job, (per_block[0], per_block[1]), (outside[0], outside[1])


def _decoders(
    device: Device, recompute: str, positions: str, zero: int | None = None, *, wide: bool = False
) -> list[Decoder]:
    """The measured decoders of one kind, by their layers; empty unless there are two to compare."""
    rows = () if device.measured is None else device.measured.profile.decoders
    alike = [row for row in rows if (row.recompute, row.zero) == (recompute, zero)]
    found = [row for row in alike if _job(row).model.positions == positions]
    widths = {_job(row).model.width for row in found}
    if not found or (wide and len(widths) == 1):
        return []
    width = max(widths) if wide else min(widths)
    found = [row for row in found if _job(row).model.width == width]
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
