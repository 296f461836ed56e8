"""Measures a peer in its own process: the time of some steps, its memory, and the formats of what it keeps."""

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from shapes import Setting


class Window:
    """Wall time of `steps` steps after `warmup`, between two waits for the device and with none in between.

    Each step's own time comes from events on the device's stream, which do not synchronise.
    """

    def __init__(self, warmup: int, steps: int, device: str) -> None:
        self.warmup, self.steps = warmup, steps
        self.ended = 0
        self._cuda = device == "cuda"
        self._marks: list[Any] = []
        self._began = self._timed_s = 0.0
        self._peak: int | None = None

    def step_ended(self) -> None:
        """To be called as the last thing of every step."""
        self.ended += 1
        if self.ended == self.warmup:
            self._wait()
            self._began = time.perf_counter()
        if self.warmup <= self.ended <= self.warmup + self.steps:
            self._marks.append(self._mark())
        if self.ended == self.warmup + self.steps:
            self._wait()
            self._timed_s = time.perf_counter() - self._began
            self._peak = torch.cuda.max_memory_allocated() if self._cuda else None

    def result(self) -> dict[str, Any]:
        """What was measured; all steps must have ended."""
        if len(self._marks) != self.steps + 1:
            raise RuntimeError(f"{self.ended} steps ended instead of {self.warmup} + {self.steps}")
        pairs = itertools.pairwise(self._marks)
        step_s = [begin.elapsed_time(end) / 1e3 if self._cuda else end - begin for begin, end in pairs]
        device = torch.cuda.get_device_name() if self._cuda else "CPU"
        return {"device": device, "timed_s": self._timed_s, "step_s": step_s, "peak_memory_bytes": self._peak}

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def kept_formats(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int]]:
    """Bytes by number format of what outlives a forward, counted on the live tensors after a backward."""
    parameters = list(model.parameters())
    states = [each for state in optimizer.state.values() for each in state.values()]
    return {
        "parameters": _bytes_by_format(parameters),
        "gradients": _bytes_by_format(each.grad for each in parameters),
        "optimizer_states": _bytes_by_format(states),
    }


def _bytes_by_format(tensors: Iterable[Any]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in tensors:
        if isinstance(each, torch.Tensor) and each.dim() > 0:  # AdamW's step counts are scalars
            name = str(each.dtype).removeprefix("torch.")
            sums[name] = sums.get(name, 0) + each.numel() * each.element_size()
    return sums


def read_request() -> tuple[Setting, Window, Path]:
    """What run.py passes to this process: the setting, the steps to time, and the file for the result."""
    asked = json.loads(sys.argv[1])
    setting = Setting(**asked["setting"])
    return setting, Window(asked["warmup"], asked["steps"], setting.device), Path(sys.argv[2])


def one_process() -> None:
    """The environment a launcher would give to the only rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def synthetic_tokens(setting: Setting, sequences: int, length: int) -> torch.Tensor:
    """Uniformly random tokens, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(setting.vocab_size, (sequences, length), generator=generator)
