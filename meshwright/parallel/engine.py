"""How a rank runs the micro-batches of a step; without a pipeline here, with one in `pipelining`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.data import Batch, Step
from meshwright.job import Job
from meshwright.layout import casts_from
from meshwright.parallel.cuda_graph import STEPS_BEFORE, MicroBatchGraph, Report, why_no_graph
from meshwright.parallel.fp8_casts import WeightCasts
from meshwright.parallel.inputs import Inputs
from meshwright.parallel.weights import Weights
from meshwright.parallel.world import World

Range = Callable[[str], AbstractContextManager[Any]]
"""Gives a context for a name, for a profiler to show."""


class Engine(Protocol):
    """A rank's model (or the stages of it that the rank holds) and the order in which it is run."""

    modules: list[nn.Module]
    """The model, or this rank's stages of it."""
    inputs: Inputs
    """What builds the model's arguments."""

    def accumulate(self, data: Step, step: int) -> Tensor:
        """Forward and backward of this rank's micro-batches; all ranks' losses add up to tp times the step's mean."""

    def held_out(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The losses of some batches, each a sum over its tokens, without gradients; zeros where others have them.

        Of pairs instead what `Pairs.sums` gives, the same on all ranks that share them.
        """

    def named(self, name: Range | None) -> None:
        """From now on run every forward and backward of a step inside a range with its name; with None inside none."""


class OneStage:
    """The whole depth of the model on this rank: micro-batches one after the other."""

    def __init__(self, job: Job, world: World, model: nn.Module, weights: Weights) -> None:
        self.modules = [model]
        self._job, self._device, self._weights, self._world = job, world.device, weights, world
        self.inputs = Inputs(job, world)
        # Code that splits the sequence relies on its full length, and routers count all of its tokens: those of one
        # micro-batch must not depend on what else is in it.
        whole = world.axis_size("cp") > 1 or (job.layout.sp and world.axis_size("tp") > 1)
        whole = whole or job.model.experts is not None
        self._trims = job.data.packing == "none" and not whole
        self._name: Range = nullcontext
        self._graph: MicroBatchGraph | None = None
        self._steps = 0
        first = casts_from(job)
        self._casts = None if first is None else WeightCasts(model, first)

    def use_graph(self, report: Report) -> None:
        """From some steps on run micro-batches as a CUDA graph, if the job asks for it and it is possible."""
        if not self._job.run.cuda_graph:
            return
        if (reason := why_no_graph(self._job, self._world)) is not None:
            report("off", reason)
            return
        self._graph = MicroBatchGraph(self.modules[0], self._weights, report)

    def accumulate(self, data: Step, step: int) -> Tensor:
        """Forward and backward of every micro-batch; afterwards the masters have the gradients."""
        [model] = self.modules
        step_tensor = torch.tensor(step)  # a number would make compiled blocks treat each step as a new constant
        loss = torch.zeros((), device=self._device)
        self._steps += 1
        graph = self._graph if self._steps > STEPS_BEFORE else None
        micro_batches = [self._trimmed(micro) for micro in data.batch.split(self._job.batch.micro_batch)]
        for number, micro in enumerate(micro_batches, start=1):
            tokens, arguments = self.inputs.training(micro, data.valid_count, step_tensor)
            self._weights.start_micro_batch(last=number == len(micro_batches))
            if self._casts is not None:
                self._casts.start(number)
            if graph is not None:
                with self._name("forward and backward"):
                    graphed = graph.run(tokens, arguments, first=number == 1)
                if graphed is not None:
                    loss = loss + graphed
                    continue
            with self._name("forward"):
                micro_loss = model(tokens, **arguments)
            with self._name("backward"):
                micro_loss.backward()
            loss = loss + micro_loss.detach()
        if self._casts is not None:
            self._casts.stop()
        self._weights.collect_gradients()
        return loss

    @torch.no_grad()
    def held_out(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The loss sums of some batches."""
        [model] = self.modules
        losses = []
        for batch in batches:
            tokens, arguments = self.inputs.held_out(self._trimmed(batch))
            losses.append(model(tokens, **arguments))
        return losses

    def named(self, name: Range | None) -> None:
        """Ranges around the whole model's forward and backward."""
        self._name = name or nullcontext

    def _trimmed(self, micro: Batch) -> Batch:
        """Of documents alone in their sequences, only as much as the longest of a micro-batch needs."""
        return micro.trimmed() if self._trims else micro
