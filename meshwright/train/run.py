"""What every way of training shares: the start, evaluation in between, a row for each step, and how it ended."""

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any, Generic, Literal, TypeVar, cast

from meshwright.checkpoint import Checkpoint, Keeper, State
from meshwright.cost import flops_per_token
from meshwright.data import Corpus, Loader, Step, StreamLoader
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model import Decoder, count_parameters
from meshwright.parallel import CompressedWeights, Engine, PipeDream, Weights, WholeWeights, World, take_traffic
from meshwright.train.bad_steps import RecentLosses, Rewind
from meshwright.train.device import device_name, device_peak_flops, gpu_of
from meshwright.train.evaluate import evaluate, score
from meshwright.train.feed import evaluates, fingerprint, held_out_batches, set_batches, training_loader
from meshwright.train.garbage import collect_if_due, collected_by_schedule
from meshwright.train.gauge import MemoryGauge
from meshwright.train.generate import generate
from meshwright.train.gpu_meter import GpuMeter
from meshwright.train.memory import WATCHED_STEPS, MemoryCurve
from meshwright.train.optimizer import build_optimizer
from meshwright.train.pulse import Pulse
from meshwright.train.recorder import Progress, Recorder
from meshwright.train.scaling import LossScale
from meshwright.train.state import capture, restore
from meshwright.train.stragglers import Stragglers, slow_ranks

FLOPS_CONVENTION = "6·P_matmul + 12·L·S·A per token (full attention, no recompute)"

E = TypeVar("E", bound=Engine | PipeDream)


@dataclass
class Outcome:
    """How a run ended."""

    reason: str = "finished"
    """finished, or interrupted when a stop was asked for."""
    step: int = 0
    loss: float | None = None
    first_val_loss: float | None = None
    val_loss: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    """The most that was held since the first step ended: allocated on a GPU, resident on a CPU."""
    steady_memory_bytes: int | None = None
    """What was held between the last two steps."""
    sample: str | None = None


@dataclass(frozen=True)
class StepNumbers:
    """What a step came to."""

    step: int
    loss: float
    norm: float
    rate: float
    data_wait_s: float
    step_s: float


class TrainingRun(ABC, Generic[E]):
    """One rank's run: everything it needs, built once; how steps are made is the subclass's."""

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        engine: E,
        weights: Weights,
        recorder: Recorder,
        progress: Progress,
        world: World,
    ) -> None:
        self.job, self.corpus, self.engine, self.weights = job, corpus, engine, weights
        self.recorder, self.progress, self.world = recorder, progress, world
        self.device = world.device
        working = weights.working if isinstance(weights, WholeWeights) else None
        self.optimizer = build_optimizer(weights.masters, job, weights.pieces(), world, working)
        self.scaling = LossScale.of(job)
        self.flops_per_token = _flops_per_token(job, "full")
        self.peak_flops = device_peak_flops(job, self.device)
        self.outcome = Outcome()
        self.attempt = 0
        """How often the run was begun before."""
        self.position = 0
        """Samples of the global stream this run has used."""
        self.pass_over: frozenset[int] = frozenset()
        """Positions of batches that are not trained on, since they came out bad again and again."""
        self.losses = RecentLosses()
        self.pulse = Pulse()
        self._keeper: Keeper | None = None
        self._resumed_step = 0
        self._step_tokens = 0
        self.loader: Loader | StreamLoader | None = None
        self._throughputs: list[float] = []
        self._gauge = MemoryGauge(self.device)
        self._gpu = GpuMeter(self.device)
        self._stragglers = Stragglers(world)
        self._curve: MemoryCurve | None = None

    def watch_memory(self, record: Callable[[dict[str, Any]], None]) -> None:
        """Have the memory curve of the first steps recorded, a row a sample; an asynchronous pipeline has none."""
        self._curve = MemoryCurve(
            self.engine.modules, self.weights, self.optimizer, self.device, self.world.rank, record
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of the tokens the run is trained on."""
        return fingerprint(self.corpus)

    def keep(self, keeper: Keeper) -> None:
        """Have checkpoints saved on the way."""
        self._keeper = keeper

    def capture(self) -> State:
        """This rank's share of the state after the last step."""
        return capture(self)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint instead of from the first weights."""
        restore(self, checkpoint)
        self._resumed_step = checkpoint.facts.step

    @abstractmethod
    def _train(self, data: Iterator[Step], stop: Callable[[], bool]) -> None:
        """Make all steps and the evaluations between them, unless asked to stop."""

    def run(self, stop: Callable[[], bool] = lambda: False, loader: Loader | StreamLoader | None = None) -> Outcome:
        """Train until run.steps, or until `stop` says so; a loader that was started early is read from and closed."""
        self._record_start()
        loader = loader or training_loader(self.job, self.corpus, self.world, self.position)
        loader.readers.on_slow = self._tell_slow_data
        self.loader = loader
        try:
            with collected_by_schedule(), self._gpu:
                if self._resumed_step == 0:
                    self._evaluate(0)
                self._train(iter(loader), stop)
        except RuntimeError as error:
            if (explained := loader.readers.explained(error)) is error:
                raise
            raise explained from error
        finally:
            loader.close()
        self.outcome.peak_memory_bytes, self.outcome.steady_memory_bytes = self._gauge.peak, self._gauge.steady
        if self._throughputs:
            # Watched steps take longer; the first is not among these anyway.
            unwatched = self._throughputs[WATCHED_STEPS - 1 :] if self._curve else self._throughputs
            self.outcome.tokens_per_s = median(unwatched or self._throughputs)
            self.outcome.mfu = self._mfu(self.outcome.tokens_per_s)
        return self.outcome

    def _next(self, data: Iterator[Step]) -> tuple[Step, float]:
        """The next step's data, and how long it kept us waiting."""
        take_traffic()  # what moved before, in an evaluation, is no step's
        started = time.perf_counter()
        while self.position in self.pass_over:
            next(data)
            self.recorder.event("passed_over", position=self.position, samples=self.job.batch.global_batch)
            self.position += self.job.batch.global_batch
        given = next(data)
        self.position += self.job.batch.global_batch
        self._step_tokens = given.tokens
        return given, time.perf_counter() - started

    def _tell_slow_data(self, sentence: str) -> None:
        """Only rank 0 records and shows; what another waits for is said in its own log."""
        if self.world.rank:
            sys.stderr.write(f"rank {self.world.rank}: {sentence}\n")
        self.recorder.event("slow_data", waiting=sentence)
        self.progress.message(sentence)

    def _ballot(self) -> list[float]:
        """What this rank has to say of checkpoints, for the sums all ranks make in a step."""
        return [0.0, 0.0, 0.0] if self._keeper is None else self._keeper.ballot()

    def _count(self, ballots: list[float]) -> None:
        if self._keeper is not None:
            self._keeper.count(ballots)

    def _save_due(self, step: int) -> bool:
        return self._keeper is not None and self._keeper.due(step)

    def _save_if_due(self, step: int) -> None:
        if self._keeper is not None:
            self.pulse.at("checkpoint")
            self._keeper.after_step(step, self.capture)

    def _record(self, numbers: StepNumbers) -> None:
        """Write a step's row and remember it as the last."""
        step, job = numbers.step, self.job
        tokens_per_s = self._step_tokens / numbers.step_s
        made = step - self._resumed_step
        if made > 1:  # the first step pays for allocation and compilation
            self._throughputs.append(tokens_per_s)
        row: dict[str, Any] = {
            "step": step,
            "loss": numbers.loss,
            "grad_norm": numbers.norm,
            "lr": numbers.rate,
            "tokens": self.outcome.tokens + self._step_tokens,
            "tokens_per_s": tokens_per_s,
            "mfu": self._mfu(tokens_per_s),
            "data_wait_s": numbers.data_wait_s,
            "step_s": numbers.step_s,
            "memory_bytes": self._gauge.after_step(made),
            "attempt": self.attempt,
            **self._gpu.reading,
        }
        if job.data.weights is not None and self.loader is not None:
            row |= {"epochs": list(self.loader.epochs)}
        if job.memory.offload:
            row |= {f"offload_{name}": value for name, value in asdict(take_traffic()).items()}
        if isinstance(self.weights, CompressedWeights) and (sent := self.weights.reduction.sent):
            row |= {"sent_bytes": sent.bytes, "compression_ratio": sent.ratio}
        if self.scaling.dynamic:
            row |= {"loss_scale": self.scaling.scale, "skipped_steps": self.scaling.skipped}
        self.outcome.step, self.outcome.loss, self.outcome.tokens = step, numbers.loss, row["tokens"]
        self.recorder.metric(row)
        self.progress.step(row)
        collect_if_due(step)

    def _compare_ranks(self, numbers: StepNumbers) -> None:
        """Now and then look for a rank that keeps the others waiting."""
        self._stragglers.step(numbers.data_wait_s)
        if self._stragglers.due(numbers.step - self._resumed_step):
            times = self._stragglers.compare()
            slow = slow_ranks(times)
            self.recorder.event("stragglers", step=numbers.step, slow=slow, **times)
            for clause in slow:
                self.progress.message(f"step {numbers.step}: {clause}")

    def _may_update(self, step: int, loss: float, norm: float, position: int) -> bool:
        """run.on_bad_step decides what a loss or gradient norm that is not finite does, and a loss that leaps."""
        settings = self.job.run
        score = self.losses.score(loss) if settings.spike_score else None
        if math.isfinite(loss) and math.isfinite(norm) and (score is None or score <= settings.spike_score):
            if settings.spike_score:
                self.losses.add(loss)
            return True
        policy = settings.on_bad_step
        data = {"position": position, "samples": self.job.batch.global_batch}
        self.recorder.event("bad_step", step=step, loss=loss, grad_norm=norm, score=score, policy=policy, **data)
        if policy == "rewind":
            raise Rewind(step, position)
        if policy == "stop":
            leap = "" if score is None else f" ({score:.1f} robust deviations above the last ones)"
            raise UserError(
                f"step {step} gave loss {loss}{leap} and gradient norm {norm}; lower optimizer.lr = "
                f'{self.job.optimizer.lr} or set run.on_bad_step = "skip"'
            )
        return policy == "keep"

    def _evaluate(self, step: int) -> None:
        self.pulse.at("evaluation")
        if evaluates(self.job):
            self._evaluate_held_out(step)
        if self.job.evaluation.every_steps:
            for name in self.job.evaluation.sets:
                self._evaluate_set(step, name)

    def _evaluate_set(self, step: int, name: str) -> None:
        tokenizer = self.corpus.tokenizer
        lengths = None if tokenizer is None else tokenizer.byte_lengths()
        found = score(self.engine, set_batches(self.job, self.corpus, name), self.world, lengths)
        row = {"set_loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
        self.recorder.metric({"step": step, "set": name, **row, "attempt": self.attempt})
        told = "" if found.bits_per_byte is None else f"  bits per byte {found.bits_per_byte:.4f}"
        self.progress.message(f"step {step}/{self.job.run.steps}  {name}: loss {found.loss:.4f}{told}")

    def _evaluate_held_out(self, step: int) -> None:
        val_loss = evaluate(self.engine, held_out_batches(self.job, self.corpus), self.world)
        self.outcome.val_loss = val_loss
        if self.outcome.first_val_loss is None:
            self.outcome.first_val_loss = val_loss
        self.recorder.metric({"step": step, "val_loss": val_loss, "attempt": self.attempt})
        self.progress.evaluation(step, val_loss)
        # A model cut over ranks gives losses, not logits to draw text from; `generate` reads the saved weights.
        if step and math.isfinite(val_loss) and self.world.size == 1:
            self._sample(step)

    def _sample(self, step: int) -> None:
        tokenizer, settings = self.corpus.tokenizer, self.job.evaluation
        if tokenizer is None or not settings.sample_tokens or self.job.model.file:
            return
        prompt = tokenizer.encode(settings.sample_prompt) or [tokenizer.end_of_text]
        room = self.job.model.max_sequence_length - len(prompt)
        written = generate(
            cast(Decoder, self.engine.modules[0]),
            prompt,
            max(0, min(settings.sample_tokens, room)),
            seed=self.job.run.seed,
            stop=tokenizer.end_of_text,
            vocab_size=tokenizer.vocab_size,
        )
        self.outcome.sample = tokenizer.decode(prompt + written)
        self.recorder.sample(step, self.outcome.sample)

    def _record_start(self) -> None:
        gpu = gpu_of(self.device)
        start: dict[str, Any] = {
            "device": device_name(self.device),
            "parameters": count_parameters(self.job.model),
            "ranks": self.world.size,
            "flops_per_token": self.flops_per_token,
            "flops_per_token_causal": _flops_per_token(self.job, "causal"),
            "flops_convention": FLOPS_CONVENTION,
            "gpu": gpu.key if gpu else None,
            "gpu_peak_flops": self.peak_flops,
            "tokens_per_step": self.job.tokens_per_step,
            "accumulation": self.job.accumulation,
            "attempt": self.attempt,
            "step": self._resumed_step,
        }
        self.recorder.event("start", **start)

    def _mfu(self, tokens_per_s: float) -> float | None:
        if self.peak_flops is None or self.flops_per_token is None:
            return None
        return tokens_per_s * self.flops_per_token / (self.peak_flops * self.world.size)


def _flops_per_token(job: Job, attention: Literal["causal", "full"]) -> float | None:
    """Model FLOPs of a token; None for a model of the user's own, whose FLOPs nobody stated."""
    return None if job.model.file else flops_per_token(job.model, job.batch.sequence_length, attention)
