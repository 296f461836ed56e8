"""The loop: rate, micro-batches, clip, step, record; evaluation in between."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, cast

import torch
from torch import nn

from meshwright.data import Corpus, Step
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model import Decoder, Draws, count_parameters, flops_per_token
from meshwright.parallel import Weights, World
from meshwright.train.device import device_name, device_peak_flops, gpu_of, peak_memory_bytes
from meshwright.train.evaluate import evaluate
from meshwright.train.feed import evaluates, held_out_batches, training_loader
from meshwright.train.generate import generate
from meshwright.train.optimizer import build_optimizer, clip_gradients, set_learning_rate
from meshwright.train.recorder import Progress, Recorder
from meshwright.train.schedule import learning_rate

FLOPS_CONVENTION = "6·P_matmul + 12·L·S·A per token (full attention, no recompute)"


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
    sample: str | None = None


class Training:
    """One run on one device: everything the loop needs, built once."""

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        model: nn.Module,
        weights: Weights,
        recorder: Recorder,
        progress: Progress,
        world: World,
    ) -> None:
        self.job, self.corpus, self.model, self.weights = job, corpus, model, weights
        self.recorder, self.progress, self.world = recorder, progress, world
        self.device = world.device
        self.optimizer = build_optimizer(weights.masters, job)
        self.flops_per_token = _flops_per_token(job, "full")
        self.peak_flops = device_peak_flops(job, self.device)
        self.outcome = Outcome()
        self._throughputs: list[float] = []

    def run(self, stop: Callable[[], bool] = lambda: False) -> Outcome:
        """Train until run.steps, or until `stop` says so after a step."""
        job = self.job
        self._record_start()
        loader = training_loader(job, self.corpus, self.world)
        try:
            self._evaluate(0)
            steps = iter(loader)
            for step in range(1, job.run.steps + 1):
                stopping = self._step(step, next_step=steps, stop=stop)
                if evaluates(job) and (step % job.evaluation.every_steps == 0 or step == job.run.steps):
                    self._evaluate(step)
                if stopping:
                    self.outcome.reason = "interrupted" if step < job.run.steps else "finished"
                    break
        finally:
            loader.close()
        if self._throughputs:
            self.outcome.tokens_per_s = median(self._throughputs)
            self.outcome.mfu = self._mfu(self.outcome.tokens_per_s)
        return self.outcome

    def _step(self, step: int, next_step: Iterator[Step], stop: Callable[[], bool]) -> bool:
        """One optimizer step; true when some rank was asked to stop."""
        job = self.job
        started = time.perf_counter()
        data = next(next_step)
        data_wait_s = time.perf_counter() - started

        rate = learning_rate(job, step)
        set_learning_rate(self.optimizer, rate)
        loss = self._accumulate(step, data)
        # Tensor-parallel ranks hold the same loss; one collective brings everything the ranks must agree on.
        loss_value, squares, stopping = self.world.sum_over_world(
            [loss / self.world.axis_size("tp"), self.weights.square_sum(), float(stop())]
        )
        norm_value = math.sqrt(squares) if squares >= 0 else squares  # the square root of NaN raises
        clip_gradients(self.weights.masters.values(), norm_value, job.optimizer.clip)
        if self._may_update(step, loss_value, norm_value):
            self.optimizer.step()
            self.weights.refresh()
        self.weights.zero_gradients()

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        step_s = time.perf_counter() - started
        tokens_per_s = job.tokens_per_step / step_s
        if step > 1:  # the first step pays for allocation and compilation
            self._throughputs.append(tokens_per_s)
        row = {
            "step": step,
            "loss": loss_value,
            "grad_norm": norm_value,
            "lr": rate,
            "tokens": step * job.tokens_per_step,
            "tokens_per_s": tokens_per_s,
            "mfu": self._mfu(tokens_per_s),
            "data_wait_s": data_wait_s,
            "step_s": step_s,
            "memory_bytes": peak_memory_bytes(self.device),
            "attempt": 0,
        }
        self.outcome.step, self.outcome.loss, self.outcome.tokens = step, loss_value, step * job.tokens_per_step
        self.recorder.metric(row)
        self.progress.step(row)
        return stopping > 0

    def _accumulate(self, step: int, data: Step) -> torch.Tensor:
        """Forward and backward of this rank's micro-batches; all ranks' losses add up to the mean over the step."""
        job = self.job
        step_tensor = torch.tensor(step)  # a number would make compiled blocks treat each step as a new constant
        loss = torch.zeros((), device=self.device)
        micro_batches = data.batch.split(job.batch.micro_batch)
        for number, micro in enumerate(micro_batches, start=1):
            micro = micro.to(self.device)
            draws = None
            if job.model.dropout:
                draws = Draws(job.run.seed, step_tensor, micro.sample_ids_B, self._places())
            self.weights.begin_micro_batch(last=number == len(micro_batches))
            micro_loss = self.model(
                micro.tokens_BS,
                micro.labels_BS,
                data.valid_count,
                positions=micro.positions_BS,
                documents=micro.documents(),
                draws=draws,
            )
            micro_loss.backward()
            loss = loss + micro_loss.detach()
        self.weights.collect_gradients()
        return loss

    def _places(self) -> torch.Tensor | None:
        """Which tokens of a sequence the residual stream on this rank holds: sequence parallelism leaves it a slice."""
        parts = self.world.axis_size("tp")
        if parts == 1 or not self.job.layout.sp:
            return None
        share = self.job.batch.sequence_length // parts
        return torch.arange(share, device=self.device) + self.world.axis_rank("tp") * share

    def _may_update(self, step: int, loss: float, norm: float) -> bool:
        """run.on_bad_step decides what a loss or gradient norm that is not finite does."""
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        policy = self.job.run.on_bad_step
        self.recorder.event("bad_step", step=step, loss=loss, grad_norm=norm, policy=policy)
        if policy == "stop":
            raise UserError(
                f"step {step} gave loss {loss} and gradient norm {norm}; lower optimizer.lr = {self.job.optimizer.lr} "
                f'or set run.on_bad_step = "skip"'
            )
        return policy == "keep"

    def _evaluate(self, step: int) -> None:
        if not evaluates(self.job):
            return
        val_loss = evaluate(self.model, held_out_batches(self.job, self.corpus), self.world)
        self.outcome.val_loss = val_loss
        if self.outcome.first_val_loss is None:
            self.outcome.first_val_loss = val_loss
        self.recorder.metric({"step": step, "val_loss": val_loss, "attempt": 0})
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
            cast(Decoder, self.model),
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
        }
        self.recorder.event("start", **start)

    def _mfu(self, tokens_per_s: float) -> float | None:
        if self.peak_flops is None or self.flops_per_token is None:
            return None
        return tokens_per_s * self.flops_per_token / (self.peak_flops * self.world.size)


def _flops_per_token(job: Job, attention: Literal["causal", "full"]) -> float | None:
    """Model FLOPs of a token; None for a model of the user's own, whose FLOPs nobody stated."""
    return None if job.model.file else flops_per_token(job.model, job.batch.sequence_length, attention)
