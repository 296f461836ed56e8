"""What is measured while a rank is rehearsed: each kind of measurement in steps of its own, so that none slows
another."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.layout import is_asynchronous
from meshwright.measure.kernels import Kernels
from meshwright.measure.phases import Phases
from meshwright.pipeline import Action
from meshwright.rehearse.copies import COPIES
from meshwright.train import Around, Silent, Trainer
from meshwright.verify.collectives import Writer

WATCHED_STEPS = 2
"""Whose memory is followed: the first allocates, and at the end of it are the optimizer's states."""
PHASE_STEPS = 2
PROFILE_STEPS = 1

KINDS = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer states"}


@dataclass(frozen=True)
class Plan:
    """Which steps measure what: after the warm-up come timed steps, then those with timers, then profiled ones."""

    warmup: int
    steps: int
    profile: bool

    @property
    def timed_until(self) -> int:
        """The last timed step."""
        return self.warmup + self.steps

    @property
    def total(self) -> int:
        """Steps in all."""
        return self.timed_until + PHASE_STEPS + (PROFILE_STEPS if self.profile else 0)


class Watch(Silent):
    """Recorder and progress of a rehearsed rank: keeps what is measured and starts each measurement when it is due.

    Losses pass through here and are not kept: they mean nothing.
    """

    def __init__(self, plan: Plan, device: torch.device, writer: Writer) -> None:
        self._plan, self._device, self._writer = plan, device, writer
        self._phases: Phases | None = None
        self._kernels = Kernels(device) if plan.profile else None
        self._timing = False
        self._step_s: list[float] = []
        self._actions: dict[str, list[float]] = defaultdict(list)
        self._samples: list[dict[str, Any]] = []
        self._around = Around()
        self.peak_bytes: int | None = None
        """Of the allocator, on a GPU."""
        self.messages: list[str] = []
        """What the trainer has to say."""

    def attach(self, training: Trainer) -> None:
        """Measure this trainer."""
        if is_asynchronous(training.job):  # its steps overlap: they are recorded together, and counted afterwards
            self._writer.on = True
            self._time_calls(training)
            return
        training.watch_memory(self._samples.append, WATCHED_STEPS)
        self._phases = Phases(training)
        if (watch := getattr(training.engine, "watch", None)) is not None:
            watch(self._action_ended)

    def metric(self, row: dict[str, Any]) -> None:
        """After every step."""
        step, plan = row["step"], self._plan
        if plan.warmup < step <= plan.timed_until:
            self._step_s.append(row["step_s"] - COPIES.take_s())
            self.peak_bytes = row["memory_bytes"] if self._device.type == "cuda" else None
        if step == plan.warmup and self._device.type == "cuda":
            COPIES.begin()
        if self._phases is None:
            return
        if step == plan.timed_until:
            self._phases.begin()
            self._writer.on = self._timing = True
        if step == plan.timed_until + 1:
            self._writer.on = False  # the calls' places in the code are looked up, which takes time
        if step == plan.timed_until + PHASE_STEPS:
            COPIES.end()
            self._phases.end()
            self._timing = False
            if self._kernels is not None:
                self._kernels.begin()
        if self._kernels is not None and step == plan.timed_until + PHASE_STEPS + PROFILE_STEPS:
            self._kernels.end(PROFILE_STEPS)

    def message(self, text: str) -> None:
        """Kept, to be shown with the result."""
        self.messages.append(text)

    @property
    def step_s(self) -> float:
        """Median of the timed steps, without the writing of replaced messages."""
        return statistics.median(self._step_s)

    @property
    def phases_s(self) -> dict[str, float]:
        """Empty for an asynchronous pipeline, whose phases overlap."""
        return {} if self._phases is None else self._phases.medians()

    @property
    def actions_s(self) -> dict[str, float]:
        """Median seconds by kind and stage; empty without a pipeline."""
        return {name: statistics.median(times) for name, times in self._actions.items()}

    @property
    def kernels(self) -> dict[str, Any] | None:
        """Seconds by kind of kernel and of the longest ones."""
        times = None if self._kernels is None else self._kernels.times
        if times is None:
            return None
        top = [vars(kernel) for kernel in times.top]
        return {"kinds_s": times.kinds_s, "top": top}

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes of each kind in the fullest sample; where there is an allocator, up to its peak."""
        if not self._samples:
            return {}
        kinds = max((_kinds(sample) for sample in self._samples), key=lambda kinds: sum(kinds.values()))
        if self.peak_bytes is not None:  # between two samples, inside a block
            kinds["activations"] += max(0, self.peak_bytes - sum(kinds.values()))
        return kinds

    def _action_ended(self, action: Action, started: float, ended: float, held: int) -> None:
        if self._timing:
            self._actions[f"{action.kind.value}{action.stage}"].append(self._now() - started - COPIES.take_s(started))

    def _time_calls(self, training: Trainer) -> None:
        stage = training.world.axis_rank("pp")
        self._around.replace(training.engine, "forward", self._timed(f"F{stage}"))
        self._around.replace(training.engine, "backward", self._timed(f"B{stage}"))

    def _timed(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(call: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any) -> Any:
                began = self._now()
                result = call(*args)
                self._actions[name].append(self._now() - began)
                return result

            return watched

        return around

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _kinds(sample: dict[str, Any]) -> dict[str, int]:
    kinds = {name: int(sample[f"{kind}_bytes"]) for kind, name in KINDS.items()}
    return {**kinds, "activations": int(sample["activations_bytes"] or 0), "other": int(sample["other_bytes"] or 0)}
