"""Where a step's time goes, measured by waiting for the device between its phases."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from meshwright.train import Around, Trainer

PHASES = ("data", "forward", "loss", "backward", "forward and backward", "reduce", "optimizer", "other")
"""`forward and backward` replaces its three parts if a pipeline interleaves them; gradient reduction that overlaps with
backward counts as backward; `reduce` is what ranks exchange afterwards, and clipping."""


class Phases:
    """Timers around the parts of a training step, while enabled."""

    def __init__(self, training: Trainer) -> None:
        self._training = training
        self._around = Around()
        self._steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = defaultdict(float)
        self._collected_at = self._step_began = 0.0

    def begin(self) -> None:
        """Start timing from the next step on."""
        training, engine = self._training, self._training.engine
        self._around.replace(training, "step", self._whole_step)
        self._around.replace(training, "_next", self._timed("data"))
        self._around.replace(engine, "accumulate", self._accumulate)
        if training.job.layout.pp == 1:
            [model] = engine.modules
            self._around.replace(model, "forward", self._timed("model"))
            if (head := getattr(model, "head", None)) is not None:
                self._around.replace(head, "forward", self._timed("loss"))
        # An update that is launched before the norm is read could not be told from what the norm takes.
        self._around.replace(training, "_launch_update", lambda call: lambda *args: None)
        self._around.replace(training, "_clip", self._clip)
        self._around.replace(training.weights, "zero_gradients", self._zero)

    def end(self) -> None:
        """Remove the timers."""
        self._around.undo()

    def medians(self) -> dict[str, float]:
        """Median seconds of every phase that occurred; the sum is about a step."""
        return {
            phase: statistics.median(step[phase] for step in self._steps)
            for phase in PHASES
            if all(phase in step for step in self._steps)
        }

    def _timed(self, phase: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(call: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any, **kwargs: Any) -> Any:
                began = self._now()
                result = call(*args, **kwargs)
                self._spent[phase] += self._now() - began
                return result

            return watched

        return around

    def _whole_step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            self._spent.clear()
            began = self._now()
            result = call(*args)
            self._steps.append(self._split(self._now() - began))
            return result

        return watched

    def _accumulate(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            began = self._now()
            result = call(*args)
            self._collected_at = self._now()
            self._spent["accumulate"] = self._collected_at - began
            return result

        return watched

    def _clip(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            result = call(*args)
            self._step_began = self._now()
            self._spent["reduce"] = self._step_began - self._collected_at
            return result

        return watched

    def _zero(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched() -> Any:
            result = call()
            self._spent["optimizer"] = self._now() - self._step_began
            return result

        return watched

    def _split(self, step_s: float) -> dict[str, float]:
        spent = self._spent
        phases = {name: spent[name] for name in ("data", "reduce", "optimizer")}
        if "model" in spent:
            phases |= {"forward": spent["model"] - spent["loss"], "loss": spent["loss"]}
            phases["backward"] = spent["accumulate"] - spent["model"]
        else:
            phases["forward and backward"] = spent["accumulate"]
        return phases | {"other": step_s - sum(phases.values())}

    def _now(self) -> float:
        if self._training.device.type == "cuda":
            torch.cuda.synchronize(self._training.device)
        return time.perf_counter()
