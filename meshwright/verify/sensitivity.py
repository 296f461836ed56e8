"""How strongly each number and tensor of a check responds to rounding, measured in float64 with perturbed numbers.

Number formats have bounds for the errors along the path through a model (`formats`). Some tensors err by more: the keys
of sharp attention, whose scores are large, and gradients whose terms nearly cancel; and so do the norms and losses of
later steps, which depend on updates. One process trains in float64 a few times while its weights, every module's result
and that result's gradient are changed by what rounding changes them, 0.39 u: 15 of the 18 roundings of a block each
way. So √(18/15) times the response is expected, and 2 / 0.39 times that is allowed, as it is of other tensors; twice
that of all parameters together. No code in 16 bits takes part, so a bug there raises no bound.

In fp32, every one of the K sums of a product rounds too, which is as wide as √(K+1) roundings of its result.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.job import Job
from meshwright.parallel import Weights
from meshwright.verify.compare import Comparison
from meshwright.verify.formats import (
    ALL,
    EXPECTED,
    LARGEST,
    MASTER_UNIT,
    SERIES,
    TENSOR_FACTOR,
    TENSORS,
    TIMES_ALONE_TOGETHER,
    UNITS,
)
from meshwright.verify.observe import Observation

SAMPLES = 3
"""Perturbed runs: of a response in one direction alone, three show a fifth of its size or more 99 times of 100."""
MOST_SAMPLES = 24
"""Runs where three explain too little: a clamp or a ReLU changes a gradient at once, or not at all. What happens to one
of six runs is seen in this many 99 times of 100."""
JUMP = 4.0
"""Times the usual response of all parameters together from which one is a jump."""
JUMP_OF_A_NUMBER = 8.0
"""The same for a number, whose responses are normally distributed: one is that far out in less than one of 10⁶ runs."""
ROUNDINGS_PER_PERTURBATION = 18 / 15
"""A block's results that are changed: two norms, projection, attention, feed-forward (each with its last projection),
its first projection and the block itself, beside 6 weights."""


def exceeds(rows: Sequence[Comparison]) -> bool:
    """Whether a number or tensor exceeds its bound by an error that its sensitivity could explain."""
    return any(_exceeds(row) for row in rows)


def unit_of(job: Job, dtype: str) -> float:
    """What a result of a module is rounded by, relative to it."""
    terms = max(job.model.width, job.model.ffn_width, job.model.heads * job.model.head_dim)
    return UNITS.get(dtype, MASTER_UNIT * math.sqrt(terms + 1))


def perturbation(unit: float, sample: int) -> Callable[[Weights, Sequence[nn.Module]], None]:
    """Changes every number of the weights, of modules' results and of their gradients by a share that is normally
    distributed, as wide as rounding's error."""
    generator = torch.Generator().manual_seed(sample)

    def perturbed(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor * (1 + EXPECTED * unit * noise.to(tensor.device))

    class Perturb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, result: Tensor) -> Tensor:
            return perturbed(result)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return perturbed(gradient)

    def perturb_result(module: nn.Module, arguments: Any, result: Any) -> Any:
        # A loss has no dimensions: it is summed in 32 bits.
        is_activation = isinstance(result, Tensor) and result.is_floating_point() and result.dim() > 1
        return Perturb.apply(result) if is_activation else result  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def perturb(weights: Weights, modules: Sequence[nn.Module]) -> None:
        for tensor in (*weights.masters.values(), *weights.frozen.values()):
            if tensor.is_floating_point():
                tensor.copy_(perturbed(tensor))
        for module in (part for stage in modules for part in stage.modules()):
            module.register_forward_hook(perturb_result)

    return perturb


def with_sensitivity(
    rows: Sequence[Comparison],
    exact: Observation,
    perturbed: Sequence[Observation],
    zeros: Collection[str],
    margin_size: float = 0.0,
) -> list[Comparison]:
    """The rows, with bounds raised to what their responses explain; without one if that is anything."""
    changed = []
    for row in rows:
        if not _exceeds(row) or row.name in zeros:
            changed.append(row)
            continue
        if row.kind in TENSORS:
            response = _response_of_tensors(row, exact, perturbed)
        else:
            response = _response_of_number(row, exact, perturbed, margin_size if row.kind == "margin" else 0.0)
        allowed = math.sqrt(ROUNDINGS_PER_PERTURBATION) * response
        allowed *= TIMES_ALONE_TOGETHER if row.name == ALL else TENSOR_FACTOR / EXPECTED
        assert row.bound is not None
        changed.append(replace(row, bound=max(row.bound, allowed) if allowed <= LARGEST else None))
    return changed


def _exceeds(row: Comparison) -> bool:
    return (row.kind in TENSORS or row.kind in SERIES) and row.ok is False and not row.note


def _response_of_tensors(row: Comparison, exact: Observation, perturbed: Sequence[Observation]) -> float:
    """The change of a parameter's tensor, or of all of them, relative to its size: the root of the mean square, or
    the jump of all parameters together."""
    field = TENSORS[row.kind]
    expected = getattr(exact, field)
    names = list(expected) if row.name == ALL else [row.name]
    norm = 2.0 if row.format else math.inf  # errors in fp32 are those of the worst entry

    def size(values: Mapping[str, Tensor]) -> float:
        norms = torch.stack([torch.linalg.vector_norm(tensor, norm) for tensor in values.values()])
        return float(torch.linalg.vector_norm(norms, norm))

    changes = [
        {name: getattr(seen, field)[name].values - expected[name].values for name in names} for seen in perturbed
    ]
    squares = [size(change) ** 2 for change in changes]
    # All together respond nearly alike in every run, unless some clamp opens in one of them.
    if row.name == ALL and max(squares) > JUMP**2 * median(squares):
        squares = [max(squares)]
    return math.sqrt(sum(squares) / len(squares)) / size({name: expected[name].values for name in names})


def _response_of_number(row: Comparison, exact: Observation, perturbed: Sequence[Observation], floor: float) -> float:
    """The change of a step's or an evaluation's number, relative to it: the root of the mean square, or a jump."""
    series, position = SERIES[row.kind], int(row.name.rpartition(" ")[2]) - 1
    expected: float = getattr(exact, series)[position]
    squares = [(getattr(seen, series)[position] - expected) ** 2 for seen in perturbed]
    if max(squares) > JUMP_OF_A_NUMBER**2 * median(squares):
        squares = [max(squares)]
    return math.sqrt(sum(squares) / len(squares)) / max(abs(expected), floor)
