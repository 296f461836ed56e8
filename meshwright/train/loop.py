"""The loop: rate, micro-batches, clip, step, record; evaluation in between."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from meshwright.data import Step
from meshwright.parallel import CompressedWeights, Engine, update
from meshwright.train.feed import evaluation_due
from meshwright.train.optimizer import OnePassAdamW, clip_factor, clip_gradients, set_learning_rate
from meshwright.train.run import StepNumbers, TrainingRun
from meshwright.train.schedule import learning_rate


class Training(TrainingRun[Engine]):
    """The usual way: all ranks make a step together."""

    _ended = 0.0
    """When the last step ended, on the host's clock."""

    def _train(self, data: Iterator[Step], stop: Callable[[], bool]) -> None:
        self._ended = time.perf_counter()
        for step in range(self.outcome.step + 1, self.job.run.steps + 1):
            with self._watched(step):
                stopping = self._step(step, data, stop)
            with self._between_steps(evaluation_due(self.job, step) or self._save_due(step)):
                if evaluation_due(self.job, step):
                    self._evaluate(step)
                self._save_if_due(step)
            if stopping:
                self.outcome.reason = "interrupted" if step < self.job.run.steps else "finished"
                break

    def _step(self, step: int, data: Iterator[Step], stop: Callable[[], bool]) -> bool:
        """One optimizer step; true when some rank was asked to stop."""
        self.pulse.at("reading data", step)
        given, data_wait_s = self._next(data)

        self.pulse.at("forward and backward")
        rate = learning_rate(self.job, step)
        set_learning_rate(self.optimizer, rate)
        if isinstance(self.weights, CompressedWeights):
            self.weights.reduction.begin(step)
        loss = self.engine.accumulate(self.scaling.applied_to(given), step)
        self.pulse.at("sum of loss and gradient norm over all ranks")
        # Tensor-parallel ranks hold the same loss; one collective brings everything the ranks must agree on.
        scaled_loss, squares, stopping, *ballots = self.world.sum_over_world(
            [loss / self.world.axis_size("tp"), self.weights.square_sum(), float(stop()), *self._ballot()]
        )
        self._sample_memory("reduced")
        loss_value = scaled_loss / self.scaling.scale
        norm_value = (math.sqrt(squares) if squares >= 0 else squares) / self.scaling.scale  # of NaN the root raises
        self.pulse.at("update")
        self._clip(norm_value)
        if not self._overflowed(step, loss_value, norm_value) and self._may_update(
            step, loss_value, norm_value, self.position - self.job.batch.global_batch
        ):
            update(self.optimizer, self.weights)
        self._sample_memory("updated")
        self.weights.zero_gradients()
        self._sample_memory("end")

        # A GPU still has the update to do: the host prepares the next step meanwhile, and a step's time is that from
        # one end on the host to the next.
        began, self._ended = self._ended, time.perf_counter()
        numbers = StepNumbers(step, loss_value, norm_value, rate, data_wait_s, self._ended - began)
        self._record(numbers)
        self._compare_ranks(numbers)
        self._count(ballots)
        return stopping > 0

    @contextmanager
    def _between_steps(self, something_to_do: bool) -> Iterator[None]:
        """Around work that is no step's: its time is not the next one's, what a GPU still does of the last one is."""
        if something_to_do and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        left_s = time.perf_counter() - self._ended
        yield
        if something_to_do:
            self._ended = time.perf_counter() - left_s

    def _watched(self, step: int) -> AbstractContextManager[None]:
        return nullcontext() if self._curve is None else self._curve.step(step)

    def _sample_memory(self, at: str) -> None:
        if self._curve is not None:
            self._curve.sample(at)

    def _clip(self, norm: float) -> None:
        if isinstance(self.optimizer, OnePassAdamW):
            self.optimizer.factor = clip_factor(norm, self.job.optimizer.clip, self.scaling.scale)
            return
        clip_gradients(self.weights.masters.values(), norm, self.job.optimizer.clip, self.scaling.scale)

    def _overflowed(self, step: int, loss: float, norm: float) -> bool:
        """Whether a step is skipped because its scaled gradients left the format's range."""
        before = self.scaling.scale
        if not self.scaling.overflowed(loss, norm):
            return False
        now, skipped = self.scaling.scale, self.scaling.skipped
        self.recorder.event("overflow", step=step, loss_scale=now, skipped_steps=skipped)
        scales = f"loss scale {before:,.0f} → {now:,.0f}"
        self.progress.message(f"step {step}: gradients overflowed; update skipped, {scales}")
        return True
