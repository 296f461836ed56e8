"""Checks an exercise: python docs/exercises/check.py EXERCISE FILE.py …    (exit 0: all are equal to one device)

The reference is a plain loop in one process. The file's function runs on one or two CPU processes in float64; its
losses and the parameters it ends with must be the reference's.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.verify import RankError, run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from toy import IGNORED, RATE, Batch, ToyGPT, toy_batches, toy_gpt

BOUND = 1e-9
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Found:
    """What one rank computed."""

    losses: list[float]
    gradients: Named
    """Of the first step, as SGD's update shows them."""
    parameters: Named
    """After the last step, whole."""
    held: float
    """The share of the model this rank holds."""


def plain_loop(model: ToyGPT, batches: Sequence[Batch], rate: float) -> list[float]:
    """What every exercise must equal: the loss is the mean over the labels that count, in the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for tokens, labels in batches:
        loss = model(tokens, labels) / (labels != IGNORED).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def observed(train: Callable[..., list[float]], prepare: Callable[[ToyGPT], None] | None = None) -> Found:
    """Train one step for the gradients, then a fresh model all steps."""
    batches, start = list(toy_batches()), _whole(toy_gpt())
    first, model = toy_gpt(), toy_gpt()
    for each in (first, model):
        if prepare is not None:
            prepare(each)
    train(first, batches[:1], RATE)
    gradients = {
        name: (start[name] - value) / RATE for name, value in _whole(first).items() if _comparable(name, prepare)
    }
    losses = [float(loss) for loss in train(model, batches, RATE)]
    parameters = {name: value for name, value in _whole(model).items() if name in gradients}
    return Found(losses, gradients, parameters, _held(model))


def reference() -> Found:
    """On one process: what is to be compared with."""
    return observed(plain_loop)


def trained(file: str) -> Found:
    """On every rank: the file's own `train`."""
    return observed(_load(file).train)


def parallelised(file: str) -> Found:
    """On every rank: the plain loop on what the file's `parallelise` makes of the model."""
    parallelise = _load(file).parallelise
    return observed(plain_loop, lambda model: parallelise(model, torch.distributed.group.WORLD))


EXERCISES: dict[str, tuple[int, Callable[[str], Found], float]] = {
    "one_device": (1, trained, 1.0),
    "data_parallel": (2, trained, 1.0),
    "fully_sharded": (2, trained, 0.6),
    "tensor_parallel": (2, parallelised, 0.8),
}
"""Ranks, what runs on each, and the largest share of the model a rank may hold."""


def check(exercise: str, file: str) -> str | None:
    """What is wrong with a file, in one sentence, or None."""
    ranks, run, share = EXERCISES[exercise]
    expected: Found = run_ranks(reference, 1)[0]
    try:
        found: list[Found] = run_ranks(run, ranks, file, timeout_s=60.0)
    except RankError as error:
        return str(error).strip().splitlines()[-1]
    sentences = (_different(mine, expected, share) for mine in found)
    return next((f"rank {rank}: {what}" for rank, what in enumerate(sentences) if what is not None), None)


def _different(mine: Found, expected: Found, share: float) -> str | None:
    """The first difference, in the order things are computed."""
    if len(mine.losses) != len(expected.losses):
        return f"{len(mine.losses)} losses for {len(expected.losses)} steps"
    if not _equal(mine.losses[0], expected.losses[0]):
        return f"the loss of the first step is {mine.losses[0]:.6f}, one device has {expected.losses[0]:.6f}"
    for name, gradient in mine.gradients.items():
        if how := _off(gradient, expected.gradients[name]):
            return f"the first loss is right, but the gradient of {name} is {how} what one device has"
    for step, pair in enumerate(zip(mine.losses, expected.losses, strict=True), start=1):
        if not _equal(*pair):
            return (
                f"the first step is right, but the loss of step {step} is {pair[0]:.6f}, one device has {pair[1]:.6f}"
            )
    if wrong := [name for name, value in mine.parameters.items() if _off(value, expected.parameters[name])]:
        return f"losses are right, but after the last step {wrong[0]} is not what one device has"
    if mine.held > share:
        return f"all numbers are right, but a rank holds {mine.held:.0%} of the model; {share:.0%} is the most allowed"
    return None


def _equal(value: float, expected: float) -> bool:
    return abs(value - expected) <= BOUND * abs(expected)


def _off(value: Tensor, expected: Tensor) -> str | None:
    """How a tensor differs: by a factor where it is one."""
    largest = max(float(expected.abs().max()), BOUND)
    if value.shape != expected.shape:
        return f"of shape {tuple(value.shape)}, not"
    if float((value - expected).abs().max()) <= BOUND * largest:
        return None
    factor = float((value * expected).sum() / (expected * expected).sum())
    proportional = float((value - factor * expected).abs().max()) <= 1e-6 * largest
    return f"{factor:.3g} times" if proportional else "not"


def _comparable(name: str, prepare: object) -> bool:
    """Layers that were replaced have parameters of their own, which `meshwright verify --layer` looks at."""
    return prepare is None or ".mlp." not in name


def _whole(model: nn.Module) -> dict[str, Tensor]:
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}


def _held(model: nn.Module) -> float:
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    return local / sum(p.numel() for p in toy_gpt().parameters())


def _load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    exercise, files = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    if exercise not in EXERCISES or not files or not all(Path(file).is_file() for file in files):
        sys.exit(f"usage: python check.py {'|'.join(EXERCISES)} FILE.py …")
    found = [check(exercise, file) for file in files]
    for file, wrong in zip(files, found, strict=True):
        print(f"{file}: {'equal to one device' if wrong is None else f'not equal: {wrong}'}")
    sys.exit(any(found))
