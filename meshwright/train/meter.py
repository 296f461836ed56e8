"""The numbers of a run: a row for every step, facts at the start, and a summary at the end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any, Literal

from meshwright.cost import flops_per_token
from meshwright.job import Job
from meshwright.model import count_parameters
from meshwright.parallel import Weights, World, take_traffic
from meshwright.train.device import device_name, device_peak_flops, gpu_of
from meshwright.train.gpu_meter import GpuMeter
from meshwright.train.memory_curve import WATCHED_STEPS
from meshwright.train.memory_usage import MemoryUsage
from meshwright.train.outcome import Outcome, StepNumbers
from meshwright.train.scaling import LossScale

FLOPS_CONVENTION = "6·P_matmul + 12·L·S·A per token (full attention, no recompute)"


class Meter:
    """Counts one rank's steps: throughput, MFU, memory, traffic."""

    def __init__(self, job: Job, world: World) -> None:
        self._job, self._world = job, world
        self.flops_per_token = _flops_per_token(job, "full")
        self.peak_flops = device_peak_flops(job, world.device)
        self._memory = MemoryUsage(world.device)
        self._gpu = GpuMeter(world.device)
        self._throughputs: list[float] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, the GPU's own counters are read from time to time."""
        with self._gpu:
            yield

    def facts(self) -> dict[str, Any]:
        """Facts at the start of a run: the machine, the model's size, and how FLOPs are counted."""
        gpu = gpu_of(self._world.device)
        return {
            "device": device_name(self._world.device),
            "parameters": count_parameters(self._job.model),
            "ranks": self._world.size,
            "flops_per_token": self.flops_per_token,
            "flops_per_token_causal": _flops_per_token(self._job, "causal"),
            "flops_convention": FLOPS_CONVENTION,
            "gpu": gpu.key if gpu else None,
            "gpu_peak_flops": self.peak_flops,
            "tokens_per_step": self._job.tokens_per_step,
            "accumulation": self._job.accumulation,
        }

    def row(
        self, numbers: StepNumbers, made: int, tokens: int, weights: Weights, scaling: LossScale
    ) -> Mapping[str, Any]:
        """A step's row except for what only the trainer knows; `made` counts the steps of this attempt."""
        tokens_per_s = tokens / numbers.step_s
        if made > 1:  # the first step includes allocation and compilation
            self._throughputs.append(tokens_per_s)
        row: dict[str, Any] = {
            "tokens_per_s": tokens_per_s,
            "mfu": self._mfu(tokens_per_s),
            "data_wait_s": numbers.data_wait_s,
            "step_s": numbers.step_s,
            "memory_bytes": self._memory.after_step(made),
            **self._gpu.reading,
        }
        if self._job.memory.offload:
            row |= {f"offload_{name}": value for name, value in asdict(take_traffic()).items()}
        if weights.reduction is not None and (sent := weights.reduction.sent):
            row |= {"sent_bytes": sent.bytes, "compression_ratio": sent.ratio}
        if scaling.dynamic:
            row |= {"loss_scale": scaling.scale, "skipped_steps": scaling.skipped}
        return row

    def end(self, outcome: Outcome, *, watched: bool) -> None:
        """Fill in the run's results; the first steps took longer if their memory was observed."""
        outcome.peak_memory_bytes, outcome.steady_memory_bytes = self._memory.peak, self._memory.steady
        if self._throughputs:
            unwatched = self._throughputs[WATCHED_STEPS - 1 :] if watched else self._throughputs
            outcome.tokens_per_s = median(unwatched or self._throughputs)
            outcome.mfu = self._mfu(outcome.tokens_per_s)

    def _mfu(self, tokens_per_s: float) -> float | None:
        if self.peak_flops is None or self.flops_per_token is None:
            return None
        return tokens_per_s * self.flops_per_token / (self.peak_flops * self._world.size)


def _flops_per_token(job: Job, attention: Literal["causal", "full"]) -> float | None:
    """Model FLOPs per token; None for a user's own model, whose FLOPs are unknown."""
    return None if job.model.file else flops_per_token(job.model, job.batch.sequence_length, attention)
