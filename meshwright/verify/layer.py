"""Grading a hand-written parallel layer: does it compute what nn.Linear computes, and with which collectives?

The contract of a layer, column- or row-parallel or any other:

- `Layer(in_features, out_features, bias, group)` creates it on every rank of a process group; it holds its own share.
- `layer.load_full(weight, bias)` takes the whole weight (out_features, in_features) and the whole bias (or None) and
  keeps this rank's share of each in its parameters.
- `layer(x)` takes the whole input (…, in_features) on every rank and returns the whole output (…, out_features) on
  every rank; what it splits and gathers in between is up to the layer.

After `backward` every parameter must hold its share of the gradient nn.Linear would have, and x the whole of its own.
"""

import importlib.util
import inspect
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.torch_private.autograd import TorchDispatchMode
from meshwright.verify.compare import measure
from meshwright.verify.ranks import RankError, run_ranks

BOUND = 1e-9
SIZES = (2, 3)
IN_FEATURES, OUT_FEATURES = 12, 18
"""Both divisible by 2 and by 3, and different, so that a transposed weight is noticed."""


@dataclass(frozen=True)
class LayerGrade:
    """The result of a layer on some ranks."""

    ranks: int
    bias: bool
    errors: dict[str, float]
    """Output, input gradient and each parameter's gradient, worst rank, relative to nn.Linear's."""
    held: list[float]
    """Share of all weight and bias entries each rank holds."""
    forward: dict[str, int]
    backward: dict[str, int]
    """Collectives by name that rank 0 issued."""
    problem: str | None = None
    """What is wrong beyond numbers: a crash, entries nobody holds, nothing sharded."""

    @property
    def first_wrong(self) -> str | None:
        """The first result that differs, in the order they are computed; None when all are equal."""
        return next((name for name, error in self.errors.items() if not error <= BOUND), None)

    @property
    def ok(self) -> bool:
        """Equal to nn.Linear, and really sharded."""
        return self.problem is None and self.first_wrong is None


def grade_layer(where: str) -> list[LayerGrade]:
    """Grade `file.py:Class` on 2 and 3 ranks, with and without bias, in float64."""
    _load(where)  # a missing file or class is refused here, once
    return [_grade(where, size, bias) for size in SIZES for bias in (True, False)]


def _grade(where: str, size: int, bias: bool) -> LayerGrade:
    try:
        seen: list[_Seen] = run_ranks(_try_layer, size, where, bias, timeout_s=60.0)
    except RankError as error:
        return LayerGrade(size, bias, {}, [], {}, {}, problem=str(error))
    names = dict.fromkeys(name for rank in seen for name in rank.errors)
    errors = {name: _worst([rank.errors[name] for rank in seen if name in rank.errors]) for name in names}
    entries = IN_FEATURES * OUT_FEATURES + (OUT_FEATURES if bias else 0)
    held = [len(rank.entries) / entries for rank in seen]
    missing = entries - len(set().union(*(rank.entries for rank in seen)))
    problem = None
    if missing:
        problem = f"{missing} of {entries} weight and bias entries are in no rank's parameters after load_full"
    elif min(held) == 1.0:
        problem = "every rank holds the whole weight: nothing is parallel"
    return LayerGrade(size, bias, errors, held, seen[0].forward, seen[0].backward, problem)


@dataclass(frozen=True)
class _Seen:
    errors: dict[str, float]
    entries: set[int]
    forward: dict[str, int]
    backward: dict[str, int]


def _try_layer(where: str, bias: bool) -> _Seen:
    """On one rank: the layer and nn.Linear with the same weights, input and output gradient."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    linear = nn.Linear(IN_FEATURES, OUT_FEATURES, bias)
    x, out_gradient = torch.randn(2, 5, IN_FEATURES), torch.randn(2, 5, OUT_FEATURES)
    layer = _load(where)(IN_FEATURES, OUT_FEATURES, bias, dist.group.WORLD)

    places = _places(layer, bias)
    layer.load_full(linear.weight.detach().clone(), linear.bias.detach().clone() if bias else None)
    expected_x, given_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = linear(expected_x)
    expected.backward(out_gradient)
    with _Collectives() as forward:
        given = layer(given_x)
    if tuple(given.shape) != tuple(expected.shape):
        raise ValueError(
            f"the output has shape {tuple(given.shape)}; the contract is {tuple(expected.shape)}, not sharded"
        )
    with _Collectives() as backward:
        given.backward(out_gradient)

    gradients = [parameter.grad for parameter in linear.parameters()]
    whole = torch.cat([torch.zeros(1), *(gradient.flatten() for gradient in gradients if gradient is not None)])
    errors = {"output": _error(given, expected), "input gradient": _error(given_x.grad, expected_x.grad)}
    for name, parameter in layer.named_parameters():
        errors[f"{name} gradient"] = _error(parameter.grad, whole[places[name]])
    entries = {int(entry) for place in places.values() for entry in place.flatten() if entry}
    return _Seen(errors, entries, dict(forward.count), dict(backward.count))


def _places(layer: nn.Module, bias: bool) -> dict[str, Tensor]:
    """Which entry of the whole each entry of each parameter is, found by loading the entries' own numbers (from 1)."""
    weights = IN_FEATURES * OUT_FEATURES
    numbers = torch.arange(1, weights + OUT_FEATURES + 1, dtype=torch.float64)
    load: Any = layer.load_full
    load(numbers[:weights].reshape(OUT_FEATURES, IN_FEATURES), numbers[weights:] if bias else None)
    places = {name: parameter.detach().round().long() for name, parameter in layer.named_parameters()}
    for name, place in places.items():
        if place.numel() and not (int(place.min()) >= 0 and int(place.max()) <= len(numbers)):
            raise ValueError(f"load_full put something other than the given values into {name}")
    return places


def _error(given: Tensor | None, expected: Tensor | None) -> float:
    assert expected is not None
    if given is None:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    return measure(given.detach(), expected.detach(), max(float(expected.detach().abs().max()), 1e-6))


def _worst(errors: list[float]) -> float:
    return float(torch.tensor(errors, dtype=torch.float64).max())  # NaN wins, unlike with Python's max


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives issued inside, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.namespace, func._opname
        if namespace in ("c10d", "_c10d_functional", "c10d_functional") and "wait" not in name:
            self.count[name.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def _load(where: str) -> Any:
    """The class that `file.py:Class` names."""
    file, colon, name = where.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise UserError(f"--layer {where} is not file.py:Class; write for example --layer my.py:ColumnParallelLinear")
    if not Path(file).is_file():
        raise UserError(f"--layer {where}: {file} does not exist; check its path")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"--layer {where}: {file} cannot be imported ({type(error).__name__}: {error}); fix it"
        ) from error
    cls = getattr(module, name, None)
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise UserError(f"--layer {where}: {file} has no nn.Module class {name}; check its name")
    if not hasattr(cls, "load_full"):
        raise UserError(
            f"--layer {where}: {name} has no method load_full(weight, bias), which gives it its weights; add it"
        )
    return cls
