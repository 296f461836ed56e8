"""What fp8 adds to a block's products: casts of their operands, and what finer scales cost."""

from meshwright.job import Job
from meshwright.layout import casts_from
from meshwright.plan.kernels import Device, Sizes, memory_s
from meshwright.plan.software import Software

_SLOWER = {"tensor": 1.0, "row": 1.06, "block": 1.41}
"""Seconds of a product over those with one scale per tensor, by precision.fp8_scales: what casts, as counted below,
leave of a 1B model's steps on an H200, 399, 433 and 488 ms (benchmarks/results/2026-11-18-precision-fp8-h200.json)."""


def slower(job: Job, device: Device) -> float:
    """Seconds of a block's product over those that `matmul_s` says."""
    return _SLOWER[job.precision.fp8_scales] if device.compute == "fp8" else 1.0


def casts_s(
    job: Job, device: Device, software: Software, products: list[Sizes], weights: float | None = None
) -> tuple[float, float]:
    """Numbers read in 16 bits and written in 8, forward and backward.

    Delayed scales need no pass over the numbers: the kernel that computes them also casts them, and weights are cast
    once a step. Dynamic ones read a tensor for its largest entry and again to cast it, with every micro-batch, or of
    weights that stay whole with the first, or with the first two where the first gathers them; the
    backward needs everything transposed as well. Eager operations write each part to memory.
    """
    fused, count = software.fusion == "fused", len(products)
    inputs = sum(rows * inner for rows, _, inner in products)
    if weights is None:
        weights = sum(inner * columns for _, columns, inner in products)
    if software.own and (first := casts_from(job)) is not None:
        weights *= first / job.accumulation
    if software.fp8_scales == "delayed":
        cast = memory_s(device, (2.0 if fused else 5.0) * inputs + 5.0 * weights / job.accumulation, 2 * count)
        return cast, 1.5 * cast
    outputs = sum(rows * columns for rows, columns, _ in products)
    if fused:
        forward = memory_s(device, 5.0 * (inputs + weights), 4 * count)
        if job.precision.fp8_scales != "tensor":  # each of the backward's two products casts both operands anew
            return forward, memory_s(device, 5.0 * (2.0 * outputs + inputs + weights), 8 * count)
        # One kernel casts to both memory orders, and an input is kept as its weight's gradient needs it.
        return forward, memory_s(device, 6.0 * outputs + 3.0 * weights, 6 * count)
    forward = memory_s(device, 33.0 * (inputs + weights), 10 * count)
    return forward, memory_s(device, 35.0 * outputs + 29.0 * (inputs + weights), 20 * count)
