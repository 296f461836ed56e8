"""How long one kernel takes: matrix products by a GPU's tiles, fused attention, and work bounded by memory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.hardware import Gpu, is_known, peak_flops
from meshwright.hardware.profile import ProductKind
from meshwright.plan.measured import Measured
from meshwright.plan.operations import Operations
from meshwright.plan.rates import Rates

# Output tiles cuBLAS chooses from and the share of the ceiling a full multiprocessor reaches with each: a smaller tile
# reads its operands more often for the same product.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.65))
_CHOICES = tuple((height, width, share, split) for height, width, share in _TILES for split in (1, 2, 4, 8))
_FILL = 128
"""Steps of the inner dimension lost to filling and draining a tile's pipeline and writing it out."""
UNKNOWN_BANDWIDTH = 2000e9
"""Bytes per second where the maker publishes none: HBM2e on four stacks, the lowest of the parts concerned."""
_ELEMENTWISE = 0.87
"""Fraction of a copy's bandwidth for kernels that also compute and reduce (an H200: norms, rotation, SwiGLU)."""
Sizes = tuple[int, int, int]
_KERNEL_S = 3e-6
"""From a kernel's start to its first useful work and from its last to the next kernel, on the device alone."""


@dataclass(frozen=True)
class Device:
    """What one GPU does per second in a job's compute format."""

    compute: str
    multiprocessors: int
    matmul_flops_per_s: float
    """Ceiling of products in the compute format."""
    wide_flops_per_s: float
    """Ceiling of products that stay in 16 bits when blocks compute in fp8: the head's."""
    backward: float
    """Share of it that the backward's products reach."""
    attention_flops_per_s: tuple[float, float, float]
    """Ceilings of fused attention by generation, which no format below 16 bits speeds up."""
    bytes_per_s: float
    """What elementwise kernels move."""
    kernel_s: float = _KERNEL_S
    """From a kernel's start to its first useful work and from its last to the next kernel, on the device alone."""
    measured: Measured | None = None
    """A calibration profile, which overrides the rates."""

    @property
    def operations(self) -> Operations | None:
        """What its profile says of the operations between products, if it is a CPU."""
        return None if self.measured is None else self.measured.operations

    @property
    def wide(self) -> str:
        """The format of products that stay wide."""
        return "bf16" if self.compute == "fp8" else self.compute


def device_of(gpu: Gpu, rates: Rates, compute: str, measured: Measured | None = None) -> Device:
    """The GPU in a compute format; a UserError where it has none. A device known only by its profile runs a format that
    was not measured as the nearest wider one."""
    if is_known(gpu) and compute not in gpu.peak:
        formats = ", ".join(name for name in gpu.peak if name != "tf32")
        raise UserError(
            f"precision.compute = {compute} is not a format of {gpu.key}, which has {formats}; set it to one of those "
            "or name another GPU"
        )
    moved = (gpu.memory_bandwidth_bytes_per_s or UNKNOWN_BANDWIDTH) * rates.copy
    wide = peak_flops(gpu, "bf16" if compute == "fp8" else compute) or peak_flops(gpu, "fp16") or gpu.peak["fp32"]
    narrow = peak_flops(gpu, "fp8") if compute == "fp8" else None
    return Device(
        compute,
        rates.multiprocessors,
        narrow * rates.matmul_fp8 if narrow else wide * rates.matmul,
        wide * rates.matmul,
        rates.backward,
        (wide * rates.attention[0], wide * rates.attention[1], wide * rates.attention[2]),
        moved if measured is None else measured.copy_bytes_per_s * _ELEMENTWISE,
        _KERNEL_S if measured is None else max(_KERNEL_S, measured.profile.kernel_s or 0.0),
        measured,
    )


_TIMES: dict[tuple[Device, bool, str], dict[Sizes, float]] = {}
"""Cached seconds of products, by device, width and kind."""


def matmul_s(
    device: Device, rows: int, columns: int, inner: int, *, wide: bool = False, kind: ProductKind = "forward"
) -> float:
    """Seconds of (rows × inner) @ (inner × columns): by tiles, corrected by what a profile measured nearby."""
    known = _TIMES.setdefault((device, wide, kind), {})
    if (rows, columns, inner) not in known:
        matmul_at_once(device, kind, [(rows, columns, inner)], wide=wide)
    return known[rows, columns, inner]


def matmul_at_once(device: Device, kind: ProductKind, sizes: Iterable[Sizes], *, wide: bool = False) -> None:
    """Compute many products together, so that later lookups take no time."""
    known = _TIMES.setdefault((device, wide, kind), {})
    new = [size for size in dict.fromkeys(sizes) if size not in known]
    if not new:
        return
    formula = _plain_s if device.operations is not None else _tiled_s
    seconds = formula(device, wide, kind, np.array(new))
    if device.measured is not None:
        dtype = device.wide if wide else device.compute
        as_measured = partial(formula, _as_measured(device, device.measured), wide, kind)
        factors = device.measured.product_factors(dtype, kind, new, as_measured)
        seconds = seconds * factors
    elif kind != "forward" and not wide:
        seconds = seconds / device.backward
    known.update(zip(new, seconds.tolist(), strict=True))


def _as_measured(device: Device, measured: Measured) -> Device:
    """The device without what it is taken to be faster by."""
    if measured.compute == measured.bandwidth == 1.0:
        return device
    return replace(
        device,
        matmul_flops_per_s=device.matmul_flops_per_s / measured.compute,
        wide_flops_per_s=device.wide_flops_per_s / measured.compute,
        bytes_per_s=device.bytes_per_s / measured.bandwidth,
    )


def _plain_s(device: Device, wide: bool, kind: ProductKind, sizes: Any) -> Any:
    """Seconds of products on a CPU, whose cores share them without tiles: arithmetic, memory and a call, in turn."""
    rows, columns, inner = (sizes[:, place].astype(float) for place in range(3))
    ceiling = device.wide_flops_per_s if wide else device.matmul_flops_per_s
    moved = 4.0 * (rows * inner + inner * columns + rows * columns)
    return 2.0 * rows * columns * inner / ceiling + moved / device.bytes_per_s + device.kernel_s


def _tiled_s(device: Device, wide: bool, kind: ProductKind, sizes: Any) -> Any:
    """Seconds of products given as (rows, columns, inner), each with the best of the available tiles and splits."""
    ceiling = device.wide_flops_per_s if wide else device.matmul_flops_per_s
    per_unit = ceiling / device.multiprocessors
    rows, columns, inner = (sizes[:, place, None].astype(float) for place in range(3))
    height, width, share, split = (np.array(column) for column in zip(*_CHOICES, strict=True))
    tiles = np.ceil(rows / height) * np.ceil(columns / width)
    depth = np.ceil(inner / split)
    rounds = np.ceil(tiles * split / device.multiprocessors)
    seconds = rounds * 2.0 * height * width * (depth + _FILL) / (per_unit * share)
    # Partial sums of a split product are written and added in float32.
    seconds = seconds + np.where(split > 1, 8.0 * split * rows * columns / device.bytes_per_s, 0.0)
    # What lies side by side in memory: outputs and inputs of the projection. The tokens, which a weight's gradient is
    # summed over, do not.
    beside = (0, 1) if kind in ("weight", "weight sum") else (1, 2)
    aligned = np.array([_alignment(min(_power(int(size[place])) for place in beside)) for size in sizes])
    moved = 2.0 * (rows * inner + inner * columns + rows * columns)[:, 0] / device.bytes_per_s
    return np.maximum(seconds.min(axis=1) / aligned, moved) + device.kernel_s


def _power(size: int) -> int:
    """The largest power of two that divides a size."""
    return size & -size


def _alignment(power: int) -> float:
    """Share of the rate that rows of this alignment reach: loads are made for lines of 128 bytes, 64 elements."""
    return {1: 0.25, 2: 0.35, 4: 0.5, 8: 0.78, 16: 0.88, 32: 0.96}.get(power, 1.0)


def attention_s(device: Device, flops: float, head_dim: int, sequence: int, generation: int) -> float:
    """Seconds of fused attention over so many FLOPs; small heads spend more on the softmax, short rows on ends."""
    ceiling = device.attention_flops_per_s[generation - 1]
    return flops / (ceiling * min(1.0, 0.76 + 0.24 * head_dim / 128) * sequence / (sequence + 256)) + device.kernel_s


def memory_s(device: Device, moved_bytes: float, kernels: int = 1) -> float:
    """Seconds of elementwise work that reads and writes so many bytes."""
    return moved_bytes / device.bytes_per_s + kernels * device.kernel_s
