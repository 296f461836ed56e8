"""How long one kernel takes on a GPU: matrix products by their tiles, fused attention, and work bounded by memory."""

from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil

from meshwright.hardware import Gpu, peak_flops
from meshwright.hardware.profile import ProductKind
from meshwright.plan.measured import Measured
from meshwright.plan.rates import Rates

# Output tiles cuBLAS chooses from and the share of the ceiling a full multiprocessor reaches with each: a smaller tile
# reads its operands more often for the same product.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.65))
_SPLITS = (1, 2, 4, 8)
_FILL = 128
"""Steps of the inner dimension lost to filling and draining a tile's pipeline and writing it out."""
UNKNOWN_BANDWIDTH = 2000e9
"""Bytes a second where the maker publishes none: HBM2e on four stacks, the least of the parts concerned."""
_KERNEL_S = 3e-6
"""From a kernel's start to its first useful work and from its last to the next kernel, on the device alone."""


@dataclass(frozen=True)
class Device:
    """What one GPU does a second, in the format a job computes in."""

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
    """A calibration profile, which knows better than the rates."""

    @property
    def wide(self) -> str:
        """The format of products that stay wide."""
        return "bf16" if self.compute == "fp8" else self.compute


def device_of(gpu: Gpu, rates: Rates, compute: str, measured: Measured | None = None) -> Device:
    """The GPU in a compute format; one it has no rate for runs as its nearest wider one."""
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
        moved if measured is None else measured.copy_bytes_per_s,
        _KERNEL_S if measured is None else measured.profile.kernel_s or _KERNEL_S,
        measured,
    )


@lru_cache(maxsize=65536)
def matmul_s(
    device: Device, rows: int, columns: int, inner: int, *, wide: bool = False, kind: ProductKind = "forward"
) -> float:
    """Seconds of (rows × inner) @ (inner × columns): by tiles, corrected by what a profile measured nearby."""
    seconds = _tiled_s(device, wide, rows, columns, inner)
    if device.measured is not None:
        dtype = device.wide if wide else device.compute
        formula = partial(_tiled_s, device, wide)
        return seconds * device.measured.product_factor(dtype, kind, (rows, columns, inner), formula)
    return seconds if kind == "forward" or wide else seconds / device.backward


def _tiled_s(device: Device, wide: bool, rows: int, columns: int, inner: int) -> float:
    """The best of the tiles and splits a library would try."""
    ceiling = device.wide_flops_per_s if wide else device.matmul_flops_per_s
    per_unit = ceiling / device.multiprocessors
    best = float("inf")
    for height, width, share in _TILES:
        tiles = ceil(rows / height) * ceil(columns / width)
        for split in _SPLITS:
            depth = ceil(inner / split)
            rounds = ceil(tiles * split / device.multiprocessors)
            seconds = rounds * 2.0 * height * width * (depth + _FILL) / (per_unit * share)
            if split > 1:  # partial sums are written and added in float32
                seconds += 8.0 * split * rows * columns / device.bytes_per_s
            best = min(best, seconds)
    best /= _alignment(min(_power(columns), _power(inner)))
    moved = 2.0 * (rows * inner + inner * columns + rows * columns) / device.bytes_per_s
    return max(best, moved) + device.kernel_s


def _power(size: int) -> int:
    """The largest power of two that divides a size."""
    return size & -size


def _alignment(power: int) -> float:
    """Share of the rate that rows of this alignment leave: loads are made for lines of 128 bytes, 64 elements."""
    return {1: 0.25, 2: 0.35, 4: 0.5, 8: 0.78, 16: 0.88, 32: 0.96}.get(power, 1.0)


def attention_s(device: Device, flops: float, head_dim: int, sequence: int, generation: int) -> float:
    """Seconds of fused attention over so many FLOPs; small heads spend more on the softmax, short rows on ends."""
    ceiling = device.attention_flops_per_s[generation - 1]
    return flops / (ceiling * min(1.0, 0.76 + 0.24 * head_dim / 128) * sequence / (sequence + 256)) + device.kernel_s


def memory_s(device: Device, moved_bytes: float, kernels: int = 1) -> float:
    """Seconds of elementwise work that reads and writes so many bytes."""
    return moved_bytes / device.bytes_per_s + kernels * device.kernel_s
