"""The loop of an asynchronous pipeline: every stage updates itself after each of its backwards, without the others.

Steps run in windows that end with an empty pipeline: there all ranks agree whether to stop, and evaluation sees one
state of the weights.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.data import Loader, Step, StreamLoader
from meshwright.job import Job
from meshwright.parallel import PipeDream
from meshwright.pipeline import Kind
from meshwright.train.feed import evaluation_due
from meshwright.train.optimizer import clip_gradients, set_learning_rate
from meshwright.train.outcome import Outcome, StepNumbers
from meshwright.train.schedule import learning_rate
from meshwright.train.trainer import Trainer

LONGEST_WINDOW = 100
"""Steps after which the pipeline is drained even if nothing requires it, so that a stop is noticed."""


def windows(job: Job, done: int = 0) -> Iterator[range]:
    """The remaining steps, split where the pipeline drains: at evaluations, at checkpoints by step, at the end, and
    every LONGEST_WINDOW steps."""
    first, every = done + 1, job.checkpoint.every_steps or 0
    for step in range(first, job.run.steps + 1):
        ends = evaluation_due(job, step) or step == job.run.steps or (every > 0 and step % every == 0)
        if ends or step - first + 1 == LONGEST_WINDOW:
            yield range(first, step + 1)
            first = step + 1


@dataclass(frozen=True)
class _Finished:
    """A step's numbers, and the tokens that its stages' routers counted."""

    numbers: StepNumbers
    counts: list[float]


class AsynchronousTrainer(Trainer):
    """One stage's run; a step's row is written when its backward reaches rank 0, the last one."""

    engine: PipeDream  # type: ignore[assignment]  # which runs by actions, and never accumulates

    def run(self, stop: Callable[[], bool] = lambda: False, loader: Loader | StreamLoader | None = None) -> Outcome:
        """Train window by window until run.steps, or until `stop` returns true."""
        with self._running(loader) as data:
            for window in windows(self.job, self.outcome.step):
                stopping = self._agree(self._run_window(window, data), stop)
                last = window[-1]
                if evaluation_due(self.job, last):
                    self._evaluate(last)
                self._save_if_due(last)
                if stopping:
                    self.outcome.reason = "interrupted" if last < self.job.run.steps else "finished"
                    break
            self._record_versions()
        return self.outcome

    def _run_window(self, window: range, data: Iterator[Step]) -> list[_Finished]:
        """This stage's part of some steps; on ranks other than 0, losses, norms and counts lack the stages before."""
        if self.expert_load is not None:
            self.engine.counted = self.expert_load.take().numel()
        steps, waits_s, counts = list[_Finished](), dict[int, float](), dict[int, Tensor | None]()
        ended = time.perf_counter()
        for kind, step in self.engine.actions(window):
            if kind is Kind.FORWARD:
                self.activity.at("reading data", step)
                given, waits_s[step] = self._next(data)
                self.activity.at("forward")
                self.engine.forward(given, step)
                counts[step] = None if self.expert_load is None else self.expert_load.take()
                continue
            loss, norm, rate, counted = self._backward_and_update(step, counts.pop(step))
            began, ended = ended, time.perf_counter()
            numbers = StepNumbers(step, loss, norm, rate, waits_s.pop(step), ended - began)
            steps.append(_Finished(numbers, counted))
            if self.world.rank == 0:
                self._record(numbers, self._load_row(counted, step))
        return steps

    def _backward_and_update(self, step: int, counts: Tensor | None) -> tuple[float, float, float, list[float]]:
        """The step's loss, the gradient norm of this and all later stages, the rate of this stage's update, and what
        experts of these stages were counted."""
        self.activity.at("backward")
        rate = learning_rate(self.job, step)
        set_learning_rate(self.optimizer, rate)
        result = self.engine.backward(step, counts)
        # The norm over all stages would be known only after waiting for every one of them.
        clip_gradients(self.weights.masters.values(), math.sqrt(result.own_squares), self.job.optimizer.clip)
        norm = math.sqrt(result.squares)
        ahead = max(self.activity.step, step) - step + 1  # batches read since, and the step's own
        if self._may_update(step, result.loss, norm, self.position - ahead * self.job.batch.global_batch):
            self.weights.update(self.optimizer)
        self.weights.zero_gradients()
        return result.loss, norm, rate, result.counts

    def _load_row(self, counts: list[float], step: int) -> dict[str, float]:
        """The load of experts as metrics, of what all stages counted."""
        if self.expert_load is None:
            return {}
        shape = self.expert_load.preference_LN.shape
        return self._loads(self.expert_load.load_of(torch.tensor(counts).long().view(shape[0], shape[1] + 1)), step)

    def _agree(self, steps: list[_Finished], stop: Callable[[], bool]) -> bool:
        """Send rank 0's numbers to the others, which record them; true if some rank was asked to stop."""
        self.activity.at("sum of losses and norms over all stages")
        leads = self.world.rank == 0
        report = [value for step in steps for value in (step.numbers.loss, step.numbers.norm, *step.counts)]
        sums = self.world.sum_over_world([*self._ballot(), *(report if leads else [0.0] * len(report)), float(stop())])
        ballots, known, stopping = sums[:3], sums[3:-1], sums[-1]
        if self.saver is not None:
            self.saver.count(ballots)
        if not leads:
            width = 2 + self.engine.counted
            for number, step in enumerate(steps):
                loss, norm, *counts = known[number * width : (number + 1) * width]
                numbers = replace(step.numbers, loss=loss, norm=norm)
                self._record(numbers, self._load_row(counts, numbers.step))
        return stopping > 0

    def _record_versions(self) -> None:
        """Record the most versions of its weights that each rank held."""
        own = self.engine.weights.most_versions
        counts = self.world.sum_over_world([own * (rank == self.world.rank) for rank in range(self.world.size)])
        self.recorder.event("weight_versions", most=[int(count) for count in counts])
