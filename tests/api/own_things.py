"""What a user's own package might hold: an optimizer, a schedule, a loss, a source and a sink. Nothing of it is part of
meshwright; tests register it, or install it as a package with entry points."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Nesterov(torch.optim.Optimizer):
    """SGD with Nesterov's momentum."""

    elementwise = True
    states: tuple[str, ...] = ("velocity",)

    def __init__(self, groups: Any, lr: float, momentum: float = 0.9, damping: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "damping": damping})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["damping"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(p.grad + group["momentum"] * velocity, alpha=-group["lr"])


class Normalised(Nesterov):
    """Divides by the norm of what it is given: of a shard on a rank, of the whole in one process."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm().clamp(min=1e-12), alpha=-group["lr"])


class Whole(Normalised):
    """The same, and it says so."""

    elementwise = False
    states = ()


class Undeclared(Nesterov):
    """Says that it keeps nothing."""

    states = ()


def inverse_root(job: Any, step: int) -> float:
    """Warm-up, then 1 / sqrt(step)."""
    warmup = max(1, job.warmup_steps)
    return min(step / warmup, (warmup / step) ** job.schedule.settings.get("power", 0.5))


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, and a penalty on the normaliser."""
    normaliser = logits.logsumexp(-1)
    return normaliser - logits.gather(1, labels.unsqueeze(1)).squeeze(1) + 1e-2 * normaliser.square()


def counted(argument: str) -> Iterator[str]:
    """So many documents."""
    for number in range(int(argument)):
        yield f"document {number} counts up to {number}: " + " ".join(map(str, range(number % 40)))


class Lines:
    """A sink: a line a row."""

    def __init__(self, run: Path, job: Any, attempt: dict[str, Any]) -> None:
        self._file = (run / "lines.txt").open("a")

    def metric(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self._file.write(f"{kind}\n")

    def close(self, finished: bool) -> None:
        self._file.write(f"closed {finished}\n")
        self._file.close()
