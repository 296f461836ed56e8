"""How strongly each tensor of a check responds to rounding, measured in float64 with perturbed weights.

Number formats have bounds for the errors along the path through a model (`formats`). Some tensors err by more: the keys
of sharp attention, whose scores are large, and gradients whose terms nearly cancel. One process trains in float64 a few
times from weights changed by what rounding changes them, 0.39 u. A third of the roundings on the path are those of
weights, so √3 times the response is expected of all of them together, and 2 / 0.39 times that is allowed, as it is of
other tensors; twice that of all parameters together. No code in 16 bits takes part, so a bug there raises no bound.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from meshwright.parallel import Weights
from meshwright.verify.compare import Comparison
from meshwright.verify.formats import (
    ALL,
    EXPECTED,
    LARGEST,
    TENSOR_FACTOR,
    TENSORS,
    TIMES_ALONE_TOGETHER,
)
from meshwright.verify.observe import Observation

SAMPLES = 3
"""Perturbed runs: of a response in one direction alone, three show a fifth of its size or more 99 times of 100."""
ROUNDINGS_PER_WEIGHT = 3.0


def exceeds(rows: Sequence[Comparison]) -> bool:
    """Whether a tensor exceeds its bound by an error that its sensitivity could explain."""
    return any(_exceeds(row) for row in rows)


def perturbation(unit: float, sample: int) -> Callable[[Weights], None]:
    """Changes every number of the weights by a share that is normally distributed, as wide as rounding's error."""
    generator = torch.Generator().manual_seed(sample)

    @torch.no_grad()
    def perturb(weights: Weights) -> None:
        for tensor in (*weights.masters.values(), *weights.frozen.values()):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
                tensor.mul_(1 + EXPECTED * unit * noise.to(tensor.device))

    return perturb


def with_sensitivity(
    rows: Sequence[Comparison], exact: Observation, perturbed: Sequence[Observation], zeros: Collection[str]
) -> list[Comparison]:
    """The rows, with bounds raised to what their tensors' responses explain; without one if that is anything."""
    return [
        _with_sensitivity(row, exact, perturbed) if _exceeds(row) and row.name not in zeros else row for row in rows
    ]


def _exceeds(row: Comparison) -> bool:
    return row.kind in TENSORS and row.ok is False and not row.note


def _with_sensitivity(row: Comparison, exact: Observation, perturbed: Sequence[Observation]) -> Comparison:
    field = TENSORS[row.kind]
    expected = getattr(exact, field)
    names = list(expected) if row.name == ALL else [row.name]
    size = math.hypot(*(float(expected[name].values.norm()) for name in names))
    squares = [
        float((getattr(seen, field)[name].values - expected[name].values).square().sum())
        for seen in perturbed
        for name in names
    ]
    error = math.sqrt(ROUNDINGS_PER_WEIGHT * sum(squares) / len(perturbed)) / size
    allowed = error * (TIMES_ALONE_TOGETHER if row.name == ALL else TENSOR_FACTOR / EXPECTED)
    assert row.bound is not None
    return replace(row, bound=max(row.bound, allowed) if allowed <= LARGEST else None)
