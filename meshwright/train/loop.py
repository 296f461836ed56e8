"""The loop: rate, micro-batches, clip, step, record; evaluation in between."""

import math
import time
from collections.abc import Callable, Iterator

import torch

from meshwright.data import Step
from meshwright.parallel import Engine
from meshwright.train.feed import evaluation_due
from meshwright.train.optimizer import clip_gradients, set_learning_rate
from meshwright.train.run import StepNumbers, TrainingRun
from meshwright.train.schedule import learning_rate


class Training(TrainingRun[Engine]):
    """The usual way: all ranks make a step together."""

    def _train(self, data: Iterator[Step], stop: Callable[[], bool]) -> None:
        for step in range(1, self.job.run.steps + 1):
            stopping = self._step(step, data, stop)
            if evaluation_due(self.job, step):
                self._evaluate(step)
            if stopping:
                self.outcome.reason = "interrupted" if step < self.job.run.steps else "finished"
                break

    def _step(self, step: int, data: Iterator[Step], stop: Callable[[], bool]) -> bool:
        """One optimizer step; true when some rank was asked to stop."""
        started = time.perf_counter()
        given, data_wait_s = self._next(data)

        rate = learning_rate(self.job, step)
        set_learning_rate(self.optimizer, rate)
        loss = self.engine.accumulate(given, step)
        # Tensor-parallel ranks hold the same loss; one collective brings everything the ranks must agree on.
        loss_value, squares, stopping = self.world.sum_over_world(
            [loss / self.world.axis_size("tp"), self.weights.square_sum(), float(stop())]
        )
        norm_value = math.sqrt(squares) if squares >= 0 else squares  # the square root of NaN raises
        self._clip(norm_value)
        if self._may_update(step, loss_value, norm_value):
            self.optimizer.step()
            self.weights.refresh()
        self.weights.zero_gradients()

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        step_s = time.perf_counter() - started
        self._record(StepNumbers(step, loss_value, norm_value, rate, data_wait_s, step_s))
        return stopping > 0

    def _clip(self, norm: float) -> None:
        clip_gradients(self.weights.masters.values(), norm, self.job.optimizer.clip)
