"""How much of a GPU's datasheet a kernel reaches: facts of an architecture, where no calibration profile says better.

Ceilings are what large, well-aligned work reaches in a training step that keeps the card at its power limit, not in a
short benchmark; shapes lower them further (see `kernels`).
"""

from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.hardware import Gpu


@dataclass(frozen=True)
class Rates:
    """What one GPU really does."""

    multiprocessors: int
    """Units that a matrix product's tiles are dealt to; a last round that is not full wastes the rest."""
    matmul: float
    """Share of the dense peak that large products reach."""
    matmul_fp8: float
    """The same in fp8, scaling and casts aside."""
    flash: float
    """Share of the 16-bit peak that fused attention reaches with heads of 128, forward and backward together."""
    copy: float
    """Share of the memory bandwidth that elementwise kernels reach."""
    collective: float
    """Share of the links' bandwidth inside a node that collectives reach with large messages."""
    node_latency_s: float
    """A step of a ring inside the node, as NCCL's tuning tables put it."""


# The ceilings of A100 and V100 are cuBLAS's on products of 8192³; Hopper's and Blackwell's are lower because their
# power limit, not their clock, bounds long runs: an H200 gives 660 to 745 of 989 TFLOP/s on the shapes of a 1B model.
_VOLTA = Rates(80, 0.80, 0.80, 0.35, 0.83, 0.75, 4e-6)
_AMPERE = Rates(108, 0.86, 0.86, 0.55, 0.85, 0.77, 4e-6)
_HOPPER = Rates(132, 0.72, 0.68, 0.43, 0.87, 0.80, 4e-6)
_BLACKWELL = Rates(148, 0.72, 0.68, 0.45, 0.85, 0.75, 4e-6)
_CONSUMER = Rates(82, 0.80, 0.75, 0.50, 0.85, 0.70, 10e-6)

_BY_PREFIX = {
    "v100": _VOLTA,
    "a100-64gb": Rates(124, 0.80, 0.80, 0.52, 0.85, 0.77, 4e-6),
    "a100": _AMPERE,
    "a40": Rates(84, 0.75, 0.75, 0.45, 0.85, 0.70, 10e-6),
    "h100-96gb-500w": Rates(132, 0.60, 0.55, 0.36, 0.87, 0.80, 4e-6),
    "h100": _HOPPER,
    "h200": _HOPPER,
    "gh200": _HOPPER,
    "b200": _BLACKWELL,
    "gb200": _BLACKWELL,
    "gb300": _BLACKWELL,
    "b300": _BLACKWELL,
    "l40s": Rates(142, 0.70, 0.65, 0.45, 0.85, 0.70, 10e-6),
    "rtx": _CONSUMER,
}


def rates_of(gpu: Gpu) -> Rates:
    """What the GPU reaches; a UserError where nothing is known of its architecture."""
    for prefix, rates in _BY_PREFIX.items():
        if gpu.key.startswith(prefix):
            return rates
    raise UserError(
        f"cluster.gpu = {gpu.key!r} has no known efficiency; plan with a GPU of the table's NVIDIA parts, "
        "or measure this one with a calibration profile"
    )
