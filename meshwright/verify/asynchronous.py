"""The reference of an asynchronous pipeline: one process that computes with weights as old as each stage's would be.

Of p stages, stage r starts a window's step i (counted from 0) after i − (p − 1 − r) of the window's updates, or before
any of them; forward and backward of that step both use those weights. The update goes to the newest ones.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.data import Step
from meshwright.job import Job
from meshwright.job.devices import Layout
from meshwright.layout import split_layers
from meshwright.model import build_architecture
from meshwright.model.sharding import LOOKED_UP
from meshwright.parallel import OneStage, Weights, WholeWeights
from meshwright.parallel.weights import square_sum
from meshwright.train import Trainer, clip_gradients, windows
from meshwright.verify.observe import Observation, observe
from meshwright.verify.replay import Choices

STALE_REFERENCE = "reference: one process with the same staleness"


def observe_stale(
    job: Job,
    master: torch.dtype | None,
    device: str = "cpu",
    choices: Choices | None = None,
    change: Callable[[Weights, Sequence[nn.Module]], None] | None = None,
) -> Observation:
    """Train an asynchronous job in this process alone, as stale as its pipeline would be, and return what was
    observed."""
    alone = job.model_copy(update={"layout": Layout()})
    return observe(alone, master, device, choices, partial(_StaleTraining, stages=_stages(job)), change)


def _stages(job: Job) -> list[set[str]]:
    """The names of each stage's parameters."""
    with torch.device("meta"):
        architecture = build_architecture(job.model)
    layers = split_layers(job, job.layout.pp)
    stages: list[set[str]] = [set() for _ in layers]
    for name, _ in architecture.model.named_parameters():
        module, _, rest = name.partition(".")
        if module == "layers":
            stage = next(stage for stage, own in enumerate(layers) if int(rest.partition(".")[0]) in own)
        else:
            stage = 0 if architecture.role(module) in LOOKED_UP else len(layers) - 1
        stages[stage].add(name)
    return stages


class _StaleTraining(Trainer):
    """The usual loop over stale weights, each stage clipped by its own norm."""

    def __init__(
        self, job: Job, corpus: Any, engine: OneStage, weights: WholeWeights, *rest: Any, stages: list[set[str]]
    ):
        *_, world = rest
        starts = {window[0] for window in windows(job)}
        stale = _StaleModel(job, world, engine, weights, stages, starts)
        super().__init__(job, corpus, stale, weights, *rest)
        self._stages = stages

    def _clip(self, norm: float) -> None:
        for names in self._stages:
            masters = {name: self.weights.masters[name] for name in names}
            own = math.sqrt(square_sum(masters, self.weights.shards()))
            clip_gradients(masters.values(), own, self.job.optimizer.clip)


class _StaleModel(OneStage):
    """The whole model, whose stages lag behind the masters by as many updates as they are before the last."""

    def __init__(
        self, job: Job, world: Any, engine: OneStage, weights: WholeWeights, stages: list[set[str]], starts: set[int]
    ) -> None:
        [model] = engine.modules
        super().__init__(job, world, model, weights)
        self._masters, self._starts = weights.masters, starts
        self._lags = {name: len(stages) - 1 - stage for stage, names in enumerate(stages) for name in names}
        self._history: list[dict[str, Tensor]] = []

    def accumulate(self, data: Step, step: int) -> Tensor:
        """Forward and backward of the whole batch with stale weights; afterwards the masters have the gradients."""
        [model] = self.modules
        if step in self._starts:
            self._history = []
        self._history.append({name: master.detach().clone() for name, master in self._masters.items()})
        now, compute = len(self._history) - 1, next(model.parameters()).dtype
        seen = {
            name: self._history[max(0, now - lag)][name].to(compute).requires_grad_()
            for name, lag in self._lags.items()
        }
        tokens, arguments = self.inputs.training(data.batch, data.valid_count, torch.tensor(step))
        loss: Tensor = functional_call(model, seen, (tokens,), arguments)
        gradients = torch.autograd.grad(loss, list(seen.values()), allow_unused=True)
        for name, gradient in zip(seen, gradients, strict=True):
            master = self._masters[name]
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self._weights.collect_gradients()
        return loss.detach()
