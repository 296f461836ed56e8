"""What adapters add to a block: to its time two small products for each projection and weights made from codes, and to
its memory what these take while they are made."""

from collections.abc import Iterator

from meshwright.cost import made_bytes
from meshwright.cost.parameters import projection_sizes
from meshwright.job import Job
from meshwright.job.adapter import adapted
from meshwright.plan.kernels import Device, memory_s
from meshwright.plan.software import Software

_CODE_BYTES = {"nf4": 0.5 + 1 / 64, "int8": 1.0}
_EAGER_BYTES = 22.0
"""Moved besides for each number by an eager program, which writes to memory what a compiled one has in registers:
indices, fp32 numbers and their multiples, written and read."""

_MASK_BYTES = 22.0
"""Of an entry of a dropout mask while it is drawn, as integers, less what it becomes."""


def adapter_products(job: Job, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Rows, columns and inner sizes of the products with A and B on one rank."""
    model, tp = job.model, job.layout.tp
    assert model.adapter is not None
    rank, sizes = model.adapter.rank, projection_sizes(model)
    for group, name in adapted(model):
        outputs, inputs = sizes[f"{group}.{name}"]
        by_inputs, whole = name in ("o", "down"), name in ("q_down", "kv_down", "k_rope")
        yield tokens, rank, inputs // (tp if by_inputs else 1)
        yield tokens, outputs // (1 if by_inputs or whole else tp), rank


def made_s(job: Job, device: Device, numbers: float, software: Software) -> float:
    """Seconds to make so many numbers of weights from codes; none if they are stored as they are computed with."""
    adapter = job.model.adapter
    if adapter is None or adapter.base == "compute":
        return 0.0
    each = _CODE_BYTES[adapter.base] + max(2, job.precision.number_bytes)
    return memory_s(device, numbers * (each + (0.0 if software.fusion == "fused" else _EAGER_BYTES)), 7)


def making_bytes(job: Job, software: Software, numbers: float, stream: float, inner: float) -> float:
    """What a block with adapters needs at once, besides what it keeps, to make the largest weight of so many numbers
    from codes, to multiply with it, to find the lengths of its rows, or to draw a dropout mask. `stream` and `inner`
    are the bytes of its tokens where they are as wide as the model and as its feed-forward part.

    The counts are those of the tensors that an eager program has at once, followed on a CPU.
    """
    adapter, compiled = job.model.adapter, software.fusion == "fused"
    if adapter is None:
        return 0.0
    each = max(2, job.precision.number_bytes)
    weight = 0.0 if adapter.base == "compute" else each * numbers
    moments = [0.0]
    if weight:
        moments += [made_bytes(job, numbers, compiled=compiled) + 2 * stream, weight + inner + 2 * stream]
    if adapter.dora:
        moments.append(weight + (1 if compiled else 2) * each * numbers)
    if adapter.dropout > 0.0 and not compiled:
        moments.append(_MASK_BYTES * inner / job.precision.number_bytes)
    return max(moments)
