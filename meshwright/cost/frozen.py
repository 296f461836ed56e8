"""Bytes of what is not trained: next to adapters, the weights in the format they are computed with or in fewer bits."""

from dataclasses import dataclass

from meshwright.cost.parameters import block_tensors, is_cut, projection_sizes, table_elements
from meshwright.job import Job
from meshwright.job.adapter import BLOCK, SCALES_PER_BLOCK

_SCALE, _TABLE = 4, 4 * (2 * 256 + 256)
"""Bytes of a scale, and of what the codes of a projection in nf4 stand for."""
_MADE = 8
"""Bytes of a number while an eager program makes it from its code."""


@dataclass(frozen=True)
class Frozen:
    """Bytes on one rank, before data-parallel ranks share them."""

    shared: float = 0.0
    """What zero 3 shards: weights, or their codes."""
    whole: float = 0.0
    """What every rank has: scales."""

    def __add__(self, other: "Frozen") -> "Frozen":
        return Frozen(self.shared + other.shared, self.whole + other.whole)

    def __mul__(self, times: float) -> "Frozen":
        return Frozen(self.shared * times, self.whole * times)


def stage_frozen(job: Job, layers: int, *, first: bool, last: bool) -> Frozen:
    """Of a stage of so many layers, all of one kind; nothing without adapters."""
    if job.model.adapter is None:
        return Frozen()
    ends = _wide(job) * table_elements(job, first=first, last=last)
    return layer_frozen(job) * layers + Frozen(ends)


def layer_frozen(job: Job) -> Frozen:
    """Of a block."""
    model, tp, ep = job.model, job.layout.tp, job.layout.ep
    if model.adapter is None:
        return Frozen()
    base, sizes, total = model.adapter.base, projection_sizes(model), Frozen()
    for name, tensor in block_tensors(model).items():
        here = tensor.elements / (tp if is_cut(model, name, tensor, tp) else 1)
        here /= ep if name.startswith("moe.experts.") else 1
        if tensor.trained:
            continue
        if base == "compute" or (size := sizes.get(name.removesuffix(".weight"))) is None or not tensor.product:
            total += Frozen(_wide(job) * here)
        elif base == "int8":
            total += Frozen(here, _SCALE * size[0])
        else:
            blocks = tensor.elements / BLOCK
            total += Frozen(here / 2 + here / BLOCK, _TABLE + _SCALE * (1 + -(-blocks // SCALES_PER_BLOCK)))
    return total


def made_bytes(job: Job, numbers: float, *, compiled: bool) -> float:
    """What a product takes to make so many numbers of a weight from codes: the weight, and in an eager program what it
    is made from; nothing if it is stored as it is computed with."""
    adapter, each = job.model.adapter, _wide(job)
    if adapter is None or adapter.base == "compute":
        return 0.0
    if compiled:
        return numbers * each
    # In nf4 the numbers are still there when their multiples are cast to fewer bits.
    return numbers * (_MADE + (each if each < _SCALE and adapter.base == "nf4" else 0))


def _wide(job: Job) -> int:
    """Bytes of a weight as it is computed with: fp8 is cast from 16 bits."""
    return max(2, job.precision.number_bytes)
