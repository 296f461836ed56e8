"""Held-out loss over training time of a peer: the clock stands still while it is evaluated."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import Setting
from torch import Tensor


class Curve:
    """Seconds of training up to some steps, and the held-out loss after some of them.

    The device is waited for only where the clock is read: after `settle` steps, before and after every evaluation.
    """

    def __init__(self, asked: dict[str, Any], evaluate: Callable[[], float], device: str) -> None:
        self._settle, self._every, self._steps = asked["settle"], asked["every"], asked["steps"]
        self._evaluate, self._cuda = evaluate, device == "cuda"
        self._ended, self._began = 0, 0.0
        self.marks: list[tuple[int, float]] = []
        self.losses: list[tuple[int, float]] = []

    def start(self) -> None:
        """To be called before the first step."""
        self._began = self._now()

    def step_ended(self) -> None:
        """To be called as the last thing of every step."""
        self._ended += 1
        evaluated = self._ended % self._every == 0 or self._ended == self._steps
        if not evaluated and self._ended != self._settle:
            return
        self.marks.append((self._ended, self._now() - self._began))
        if evaluated:
            self.losses.append((self._ended, self._evaluate()))
        self._began = self._now()

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def read_request() -> tuple[Setting, dict[str, Any], Path]:
    """What speedrun.py passes to this process: the shape, the run, and the file for the result."""
    asked = json.loads(sys.argv[1])
    return Setting(**asked["setting"]), asked, Path(sys.argv[2])


def read_tokens(path: str) -> tuple[Tensor, Tensor]:
    """Sequences to train on in their order, and held-out ones; each has one token more than a sequence, its last
    label."""
    with np.load(path) as arrays:
        return torch.from_numpy(arrays["train"]), torch.from_numpy(arrays["held_out"]).long()


def held_out_loss(logits: Callable[[Tensor], Tensor], tokens: Tensor) -> float:
    """Mean cross-entropy of the sequences, as many at a time as `tokens` has in a group (G, B, S + 1).

    The model stays in training mode, which without dropout computes the same and is not compiled again.
    """
    total, count = 0.0, 0
    with torch.no_grad():
        for group in tokens:
            predicted = logits(group[:, :-1].contiguous())
            labels = group[:, 1:].flatten()
            for rows, answers in zip(predicted.flatten(0, 1).split(8192), labels.split(8192), strict=True):
                total += float(torch.nn.functional.cross_entropy(rows.float(), answers, reduction="sum"))
            count += labels.numel()
    return total / count
