"""How much of a GPU's datasheet a kernel reaches: facts of an architecture, where there is no calibration profile.

Ceilings are what large, well-aligned work reaches in a training step that keeps the card at its power limit, not in a
short benchmark; shapes lower them further (see `kernels`).
"""

from dataclasses import dataclass, replace

from meshwright.hardware import Gpu, Profile


@dataclass(frozen=True)
class Rates:
    """What one GPU really does."""

    multiprocessors: int
    """Units that a matrix product's tiles are distributed to; a last wave that is not full wastes the rest."""
    matmul: float
    """Share of the dense peak that large products reach."""
    matmul_fp8: float
    """The same in fp8, scaling and casts aside."""
    backward: float
    """Share of that the backward's products keep, whose operands are transposed."""
    attention: tuple[float, float, float]
    """Share of the 16-bit peak that causal fused attention reaches with heads of 128 over long sequences, forward and
    backward together, by generation of the kernel: the first, the second, and the makers' own."""
    copy: float
    """Share of the memory bandwidth that elementwise kernels reach."""
    collective: float
    """Share of the links' bandwidth inside a node that collectives reach with large messages."""
    node_latency_s: float
    """A step of a ring inside the node, as NCCL's tuning tables put it."""
    guess: str = ""
    """Where the figures are from if they are a guess, and how far predictions with them are from other runs; empty for
    parts that many published runs have checked."""
    origin: str = "derived from published rows"
    """What the figures are from, if no profile replaces them."""


# Ceilings of Hopper and Blackwell are lower because their power limit, not their clock, bounds long runs: an H200 gives
# 660 to 745 of 989 TFLOP/s on the shapes of a 1B model. Attention: FlashAttention's own figures for A100 (about 100 and
# 170 TFLOP/s) and H100, and a measured H200 (heads of 64: 237 with the second generation, 376 with cuDNN's).
# Elementwise kernels: an H200 copies at 0.875 of its datasheet's bandwidth, and norms, rotation and SwiGLU run at 0.87
# of that: other cards, which nobody measured for us, are taken to do the same.
_VOLTA = Rates(80, 0.80, 0.80, 0.95, (0.30, 0.30, 0.30), 0.76, 0.75, 4e-6)
_AMPERE = Rates(108, 0.80, 0.80, 0.95, (0.32, 0.50, 0.50), 0.76, 0.77, 4e-6)
_HOPPER = Rates(132, 0.68, 0.66, 0.95, (0.20, 0.29, 0.42), 0.76, 0.80, 4e-6)
_BLACKWELL = Rates(148, 0.55, 0.62, 0.95, (0.12, 0.16, 0.35), 0.76, 0.75, 4e-6)
_CONSUMER = Rates(
    82, 0.80, 0.75, 0.95, (0.32, 0.50, 0.50), 0.76, 0.70, 10e-6, origin="data sheet, with the shares of other GPUs"
)

# AMD's parts, which nobody has calibrated for us. The rows named here are in benchmarks/evidence/published_amd.csv.
# CDNA 3: AMD's "max-achievable" 708 (MI300X) and 843 (MI325X) of 1307 TFLOP/s in bf16, 1273 and 1519 of 2615 in fp8
# (ROCm blog, February 2025), all times 0.885, with which one run meets its measurement, rocmtrain-001. Fused attention,
# 328.6 TFLOP/s with heads of 64; copies, 4.11 of 5.3 TB/s; all-reduces of eight, 317 of 448 GB/s: Azure's benchmarking
# guide, ND MI300X v5.
_CDNA3 = Rates(304, 0.48, 0.43, 0.95, (0.29, 0.29, 0.29), 0.775, 0.70, 4e-6)
# CDNA 2: products such that one run meets its measurement, lumitest-001; attention's share as on CDNA 3; copies as on
# older cards; links, 148 of 200 GB/s between the dies of a module (arXiv:2302.14827, which LUMI's tests refer to).
_CDNA2 = Rates(110, 0.56, 0.56, 0.95, (0.29, 0.29, 0.29), 0.80, 0.74, 4e-6)

_AMD = {
    "mi250x": replace(
        _CDNA2,
        guess="guessed from one run of LUMI's own tests; six others there took from 1% to 36% longer than predicted",
    ),
    "mi300x": replace(
        _CDNA3,
        guess="guessed from AMD's benchmarks and one of its runs; six other runs took from 4% less to 44% longer than "
        "predicted, the longest with one short sequence a micro-batch",
    ),
    "mi325x": replace(
        _CDNA3,
        matmul=0.57,
        matmul_fp8=0.515,
        guess="guessed from AMD's benchmarks; five of its runs took from 8% less to 1% longer than predicted",
    ),
}

_BY_PREFIX = {
    "v100": _VOLTA,
    "a100-64gb": replace(_AMPERE, multiprocessors=124, matmul=0.74),
    "a100": _AMPERE,
    "a40": replace(_CONSUMER, multiprocessors=84, matmul=0.75),
    # 500 W instead of 700: what computes slows down with the clock, what memory bounds does not.
    "h100-96gb-500w": replace(_HOPPER, matmul=0.56, matmul_fp8=0.50, attention=(0.165, 0.24, 0.35)),
    "h100": _HOPPER,
    "h200": _HOPPER,
    "gh200": replace(_HOPPER, origin="data sheet, with the H100's shares, derived from published rows"),
    "b200": _BLACKWELL,
    "b300": replace(_BLACKWELL, origin="data sheet, with the B200's shares, derived from published rows"),
    "gb200": _BLACKWELL,
    # 1400 W instead of 1200 for the same peak: by as much as 500 W take from an H100 of 700.
    "gb300": replace(_BLACKWELL, matmul=0.60, matmul_fp8=0.68, attention=(0.13, 0.175, 0.38)),
    "l40s": replace(_CONSUMER, multiprocessors=142, matmul=0.70, matmul_fp8=0.65),
    "rtx": _CONSUMER,
    **_AMD,
}


def measured_rates(profile: Profile) -> Rates:
    """For a device known only from a profile: its fastest measured product is the peak, so nothing is lost."""
    return replace(_CONSUMER, multiprocessors=profile.units, matmul=1.0, matmul_fp8=1.0, backward=1.0, copy=1.0)


def rates_of(gpu: Gpu) -> Rates:
    """What a GPU of the table reaches."""
    return next(rates for prefix, rates in _BY_PREFIX.items() if gpu.key.startswith(prefix))
