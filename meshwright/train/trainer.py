"""One rank's training in one file: build, resume, loop, evaluate, save, end.

`set_up_trainer` (setup.py) builds the model and resumes; `Trainer.run` is the loop; `Trainer.step` is one optimizer
step, line by line in order of execution.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from meshwright.checkpoint import Checkpoint, Saver, State
from meshwright.data import Corpus, Loader, Step, StreamLoader
from meshwright.job import Job
from meshwright.model import Decoder
from meshwright.parallel import Engine, OneStage, Weights, World, take_traffic
from meshwright.torch_private.compiler import graphs_and_stops, where_it_stopped
from meshwright.train.activity import Activity
from meshwright.train.bad_steps import BadSteps, Rewind
from meshwright.train.evaluations import Evaluations
from meshwright.train.expert_load import ExpertLoad, Load
from meshwright.train.feed import evaluation_due, fingerprint, training_loader
from meshwright.train.garbage import collect_if_due, collected_by_schedule
from meshwright.train.memory_curve import WATCHED_STEPS, MemoryCurve
from meshwright.train.meter import Meter
from meshwright.train.optimizer import OnePassAdamW, build_optimizer, clip_factor, clip_gradients, set_learning_rate
from meshwright.train.outcome import Outcome, StepNumbers
from meshwright.train.preference import PairReferences
from meshwright.train.recorder import Progress, Recorder
from meshwright.train.scaling import LossScale
from meshwright.train.schedule import learning_rate
from meshwright.train.state import capture, restore
from meshwright.train.stragglers import Stragglers, slow_ranks
from meshwright.train.trace import Trace, TraceSteps


class Trainer:
    """One rank's run with synchronous steps: all ranks do every step together."""

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        engine: Engine,
        weights: Weights,
        recorder: Recorder,
        progress: Progress,
        world: World,
    ) -> None:
        self.job, self.corpus, self.engine, self.weights = job, corpus, engine, weights
        self.recorder, self.progress, self.world = recorder, progress, world
        self.device = world.device
        self.optimizer = build_optimizer(weights.masters, job, weights.shards(), world, weights.working)
        self.scaling = LossScale.of(job)
        self.meter = Meter(job, world)
        self.expert_load = None if job.model.experts is None else ExpertLoad(job, engine.modules, world)
        self.evaluations = Evaluations(job, corpus, engine, recorder, progress, world)
        self.bad_steps = BadSteps(job, recorder)
        if isinstance(engine, OneStage):
            engine.use_graph(lambda state, reason: recorder.event("cuda_graph", state=state, reason=reason))
        self.outcome = Outcome()
        self.attempt = 0
        """How many attempts came before."""
        self.position = 0
        """Samples of the global stream this run has used."""
        self.pass_over: frozenset[int] = frozenset()
        """Positions of batches that are skipped because they were bad repeatedly."""
        self.activity = Activity()
        self.saver: Saver | None = None
        """Saves checkpoints during the run."""
        self.loader: Loader | StreamLoader | None = None
        self._references: PairReferences | None = None
        self._stragglers = Stragglers(world)
        self._memory_curve: MemoryCurve | None = None
        self._trace: Trace | None = None
        self._resumed_step = 0
        self._step_tokens = 0
        self._ended = 0.0
        """When the last step ended, on the host's clock."""

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the tokens the run is trained on."""
        return fingerprint(self.corpus)

    def refer_to(self, references: PairReferences) -> None:
        """Compare the model with what another gives the same pairs of answers."""
        self._references = references
        self.engine.inputs.references = references.train
        self.evaluations.references = references.validation

    def watch_memory(self, record: Callable[[dict[str, Any]], None], steps: int = WATCHED_STEPS) -> None:
        """Record the memory curve of the first steps, one row per sample; not for an asynchronous pipeline."""
        parts = (self.engine.modules, self.weights, self.optimizer, self.device, self.world.rank)
        report, compiled = self.progress.message, self.job.run.compiles
        self._memory_curve = MemoryCurve(*parts, record, report, compiled=compiled, steps=steps)

    def trace(self, steps: TraceSteps, folder: Path, report: Callable[[str], None] | None = None) -> None:
        """Trace some of the steps into a folder, one file per rank; `report` gets what prevents it."""
        report = report or self._report_no_trace
        self._trace = Trace(steps, folder, self, report)
        if steps.last <= self._resumed_step:
            report(f"no trace of {steps}: this attempt continues after step {self._resumed_step}")

    def resume(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint instead of starting from initial weights."""
        restore(self, checkpoint)
        self._resumed_step = checkpoint.facts.step

    def capture(self) -> State:
        """This rank's shard of the state after the last step."""
        return capture(self)

    def run(self, stop: Callable[[], bool] = lambda: False, loader: Loader | StreamLoader | None = None) -> Outcome:
        """Train until run.steps, or until `stop` returns true; a loader that was started early is used and closed."""
        with self._running(loader) as data:
            self._ended, before = time.perf_counter(), graphs_and_stops()
            for step in range(self.outcome.step + 1, self.job.run.steps + 1):
                with self._traced(step):
                    with self._watched(step):
                        stopping = self.step(step, data, stop)
                    if step == self._resumed_step + 1:
                        self._report_uncompiled(before)
                    evaluating, saving = evaluation_due(self.job, step), self._save_due(step)
                    with self._between_steps(evaluating or saving):
                        if evaluating:
                            self._evaluate(step)
                        self._save_if_due(step)
                if stopping:
                    self.outcome.reason = "interrupted" if step < self.job.run.steps else "finished"
                    break
        return self.outcome

    def step(self, step: int, data: Iterator[Step], stop: Callable[[], bool]) -> bool:
        """One optimizer step; true if some rank was asked to stop."""
        self.activity.at("reading data", step)
        given, data_wait_s = self._next(data)

        self.activity.at("forward and backward")
        rate = learning_rate(self.job, step)
        set_learning_rate(self.optimizer, rate)
        self.weights.start_step(step)
        if self.expert_load is not None:
            self.expert_load.scale_losses(self.scaling.scale)
        loss = self.engine.accumulate(self.scaling.applied_to(given), step)

        self.activity.at("sum of loss and gradient norm over all ranks")
        # Tensor-parallel ranks have the same loss; one collective sums everything the ranks must agree on.
        alike = self.world.axis_size("tp")
        preferred = [total / alike for total in self._preferred()]
        own_squares = self.weights.square_sum()
        sums = self.world.start_sum(
            [
                *(loss / alike, self._extra_loss() / alike, own_squares, float(stop())),
                *(*preferred, *self._ballot()),
            ]
        )
        self._launch_update(loss, own_squares)
        scaled_loss, scaled_extra, squares, stopping, *more = sums()
        rewards, ballots = more[: len(preferred)], more[len(preferred) :]
        self._sample_memory("reduced")
        loss_value = scaled_loss / self.scaling.scale
        extra_loss = {"extra_loss": scaled_extra / self.scaling.scale} if self.job.model.extra_tokens else {}
        norm_value = (math.sqrt(squares) if squares >= 0 else squares) / self.scaling.scale  # NaN is passed through

        self.activity.at("update")
        self._clip(norm_value)
        position = self.position - self.job.batch.global_batch
        overflowed = self._overflowed(step, loss_value, norm_value)
        updates = not overflowed and self._may_update(step, loss_value, norm_value, position)
        if updates:
            self.weights.update(self.optimizer)
        elif isinstance(self.optimizer, OnePassAdamW):
            self.optimizer.forget()
        loads = {} if self.expert_load is None else self._loads(self.expert_load.settle(updated=updates), step)
        self._sample_memory("updated")
        self.weights.zero_gradients()
        self._sample_memory("end")

        # A GPU still has the update to do: the host prepares the next step meanwhile, and a step's time is measured on
        # the host from one end to the next.
        began, self._ended = self._ended, time.perf_counter()
        numbers = StepNumbers(step, loss_value, norm_value, rate, data_wait_s, self._ended - began)
        self._record(numbers, extra_loss | loads | _reward_row(rewards, given.valid_count))
        self._compare_ranks(numbers)
        if self.saver is not None:
            self.saver.count(ballots)
        return stopping > 0

    @contextmanager
    def _running(self, loader: Loader | StreamLoader | None) -> Iterator[Iterator[Step]]:
        """Around the loop: record the start, read the data, save the last state."""
        assert self._references is not None or not self.job.prefers, "refer_to was not called"
        self.recorder.event("start", **self.meter.facts(), attempt=self.attempt, step=self._resumed_step)
        self.loader = loader or training_loader(self.job, self.corpus, self.world, self.position)
        try:
            with _reading(self.loader, self._report_slow_data), collected_by_schedule(), self.meter.reading():
                if self._resumed_step == 0:
                    self._evaluate(0)
                yield iter(self.loader)
        except Rewind:
            if self.saver is not None:
                self.saver.settle()
            raise
        except Exception:
            if self.saver is not None:
                self.saver.abandon()
            raise
        if self._trace is not None:
            self._trace.end()
        self.meter.end(self.outcome, watched=self._memory_curve is not None)
        if self.saver is not None:
            self.saver.finish(self.outcome.step, self.capture)
            self.outcome.backup_missing = self.saver.backup_missing

    def _next(self, data: Iterator[Step]) -> tuple[Step, float]:
        """The next step's data, and how long we waited for it."""
        take_traffic()  # traffic of an evaluation belongs to no step
        started = time.perf_counter()
        while self.position in self.pass_over:
            next(data)
            self.recorder.event("passed_over", position=self.position, samples=self.job.batch.global_batch)
            self.position += self.job.batch.global_batch
        given = next(data)
        self.position += self.job.batch.global_batch
        self._step_tokens = given.tokens
        return given, time.perf_counter() - started

    def _launch_update(self, loss: Tensor, squares: Tensor) -> None:
        """Prepare an update in one pass while the GPU computes gradients, and launch it if only finite numbers decide
        whether it is made: otherwise the GPU would have nothing to do while the host reads the norm."""
        if not isinstance(self.optimizer, OnePassAdamW):
            return
        self.optimizer.collect()
        run = self.job.run
        if self.world.size == 1 and not (self.scaling.dynamic or run.spike_score or run.on_bad_step == "keep"):
            self.optimizer.launch_if_finite(loss, squares, self.job.optimizer.clip)

    def _clip(self, norm: float) -> None:
        if isinstance(self.optimizer, OnePassAdamW):
            self.optimizer.factor = clip_factor(norm, self.job.optimizer.clip, self.scaling.scale)
            return
        clip_gradients(self.weights.masters.values(), norm, self.job.optimizer.clip, self.scaling.scale)

    def _extra_loss(self) -> Tensor | float:
        """This rank's part of the step's loss of extra tokens: zero without them, and where no stage computes it."""
        if not self.job.model.extra_tokens:
            return 0.0
        taken = [cast(Decoder, module).take_extra_loss() for module in self.engine.modules]
        return sum((loss for loss in taken if loss is not None), torch.zeros((), device=self.device))

    def _preferred(self) -> Sequence[Tensor | float]:
        """This rank's part of the sums of a step's rewards; none where the loss is that of tokens."""
        if not self.job.prefers:
            return []
        taken = self.engine.inputs.tally.take()
        return [0.0, 0.0, 0.0] if taken is None else list(taken)

    def _loads(self, load: Load, step: int) -> dict[str, float]:
        """The load of experts as metrics; where the run is evaluated, every expert's is recorded."""
        if evaluation_due(self.job, step) or step == self.job.run.steps:
            assert self.job.model.experts is not None
            first = self.job.model.experts.first_dense
            self.recorder.event("experts", step=step, first_layer=first, **load.event())
        return load.row()

    def _overflowed(self, step: int, loss: float, norm: float) -> bool:
        """Whether a step is skipped because its scaled gradients overflowed."""
        before = self.scaling.scale
        if not self.scaling.overflowed(loss, norm):
            return False
        now, skipped = self.scaling.scale, self.scaling.skipped
        self.recorder.event("overflow", step=step, loss_scale=now, skipped_steps=skipped)
        scales = f"loss scale {before:,.0f} → {now:,.0f}"
        self.progress.message(f"step {step}: gradients overflowed; update skipped, {scales}")
        return True

    def _may_update(self, step: int, loss: float, norm: float, position: int) -> bool:
        return self.bad_steps.may_update(step, loss, norm, position)

    def _evaluate(self, step: int) -> None:
        self.activity.at("evaluation")
        self.evaluations.run(step, self.outcome, self.attempt)

    def _ballot(self) -> list[float]:
        """This rank's votes on checkpoints, for the sums over all ranks in a step."""
        return [0.0, 0.0, 0.0] if self.saver is None else self.saver.ballot()

    def _save_due(self, step: int) -> bool:
        return self.saver is not None and self.saver.due(step)

    def _save_if_due(self, step: int) -> None:
        if self.saver is not None:
            self.activity.at("checkpoint")
            self.saver.after_step(step, self.capture)

    def _record(self, numbers: StepNumbers, more: dict[str, float] | None = None) -> None:
        """Write a step's row, with more of its numbers, and keep it as the last."""
        outcome, made = self.outcome, numbers.step - self._resumed_step
        outcome.step, outcome.loss, outcome.tokens = numbers.step, numbers.loss, outcome.tokens + self._step_tokens
        row: dict[str, Any] = {
            "step": numbers.step,
            "loss": numbers.loss,
            "grad_norm": numbers.norm,
            "lr": numbers.rate,
            "tokens": outcome.tokens,
            "attempt": self.attempt,
            **self.meter.row(numbers, made, self._step_tokens, self.weights, self.scaling),
            **(more or {}),
        }
        if self.job.data.weights is not None and self.loader is not None:
            row["epochs"] = list(self.loader.epochs)
        self.recorder.metric(row)
        self.progress.step(row)
        collect_if_due(numbers.step)

    def _compare_ranks(self, numbers: StepNumbers) -> None:
        """From time to time look for a rank that keeps the others waiting."""
        self._stragglers.step(numbers.data_wait_s)
        if self._stragglers.due(numbers.step - self._resumed_step):
            times = self._stragglers.compare()
            slow = slow_ranks(times)
            self.recorder.event("stragglers", step=numbers.step, slow=slow, **times)
            for clause in slow:
                self.progress.message(f"step {numbers.step}: {clause}")

    def _report_uncompiled(self, before: tuple[int, int]) -> None:
        """After the first step: where the compiler stops inside what is recomputed, it leaves the whole block as it is,
        which is slower than planned, and says nothing. Seen only if it compiled nothing else."""
        (graphs, stops), (graphs_before, stops_before) = graphs_and_stops(), before
        if self.job.run.compiles and graphs == graphs_before and stops > stops_before:
            where = where_it_stopped()
            self.outcome.uncompiled = f"run.compile = true, but blocks run without the compiler, which stopped: {where}"
            self.recorder.event("uncompiled", reason=where)
            self._say(self.outcome.uncompiled)

    def _report_slow_data(self, sentence: str) -> None:
        self.recorder.event("slow_data", waiting=sentence)
        self._say(sentence)

    def _report_no_trace(self, sentence: str) -> None:
        self.recorder.event("no_trace", error=sentence)
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        """Only rank 0 records and prints; another rank's sentence is in its own log."""
        if self.world.rank:
            sys.stderr.write(f"rank {self.world.rank}: {sentence}\n")
        self.progress.message(sentence)

    @contextmanager
    def _between_steps(self, something_to_do: bool) -> Iterator[None]:
        """Around work between steps: its time does not count for the next step, pending GPU work of the last does."""
        if something_to_do and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        left_s = time.perf_counter() - self._ended
        yield
        if something_to_do:
            self._ended = time.perf_counter() - left_s

    def _watched(self, step: int) -> AbstractContextManager[None]:
        return nullcontext() if self._memory_curve is None else self._memory_curve.step(step)

    def _traced(self, step: int) -> AbstractContextManager[None]:
        if self._trace is None or not self._trace.covers(step):
            return nullcontext()
        return self._trace.step(step, self._between_steps)

    def _sample_memory(self, at: str) -> None:
        if self._memory_curve is not None:
            self._memory_curve.sample(at)


def _reward_row(sums: Sequence[float], pairs: float) -> dict[str, float]:
    """The means over a step's pairs as metrics."""
    if not sums:
        return {}
    chosen, rejected, right = (total / max(1.0, pairs) for total in sums)
    row = {"reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": chosen - rejected}
    return {**row, "preference_accuracy": right}


@contextmanager
def _reading(loader: Loader | StreamLoader, on_slow: Callable[[str], None]) -> Iterator[None]:
    """Inside, a slow worker is reported and a failed one explained; on exit all are stopped."""
    loader.readers.on_slow = on_slow
    try:
        yield
    except RuntimeError as error:
        if (explained := loader.readers.explained(error)) is error:
            raise
        raise explained from error
    finally:
        loader.close()
