"""Measure a job: run its own training loop over its own data, time some steps, and profile others."""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.cost import Mode, decoder_cost, flops_per_token
from meshwright.data import Corpus
from meshwright.errors import UserError
from meshwright.hardware import profile_of
from meshwright.hardware.profile import CPU
from meshwright.job import Job
from meshwright.layout import is_asynchronous, recompute_modes, table_of
from meshwright.measure.kernels import Kernels, KernelTimes
from meshwright.measure.phases import Phases
from meshwright.model import count_parameters
from meshwright.parallel import World, build, steps_until_captured
from meshwright.plan import compare_with_plan
from meshwright.runs.traces import traces_in
from meshwright.train import (
    BLANK,
    Outcome,
    Silent,
    TraceSteps,
    choose_attention,
    device_name,
    device_peak_flops,
    make_trainer,
    require_nvtx,
    require_traceable,
    training_loader,
)

PHASE_STEPS = 2
PROFILE_STEPS = 2
TRACE_STEPS = 2


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one quantity."""

    median: float
    low: float
    """A tenth are below."""
    high: float
    """A tenth are above."""
    least: float
    most: float


@dataclass(frozen=True)
class Bench:
    """The result of a bench. Rates are over all devices unless stated otherwise."""

    device: str
    devices: int
    torch: str
    parameters: int
    warmup: int
    steps: int
    tokens_per_step: int
    first_step_s: float
    """Includes compilation and allocation."""
    timed_s: float
    """From the end of the warm-up to the end of the last timed step, including the time between steps."""
    step_s: Spread
    tokens_per_s: float
    """By the median step."""
    tokens_per_s_per_device: float
    mfu: float | None
    """Based on 6·P_matmul + 12·L·S·A FLOPs per token, which count attention over the whole sequence."""
    mfu_causal: float | None
    """As mfu, but counting only attention under the causal mask."""
    hfu: float | None
    """As mfu, plus what recomputation and flash attention's backward repeat."""
    peak_memory_bytes: int | None
    steady_memory_bytes: int | None
    reserved_memory_bytes: int | None
    """Memory reserved by torch's allocator; None on a CPU."""
    device_memory_bytes: int | None
    """Memory in use on the device by all processes; None on a CPU."""
    data_wait_share: float
    """Fraction of the timed steps' time."""
    losses: list[float]
    phases_s: dict[str, float] | None
    """Median seconds of a step's phases; measured in separate steps, since each phase waits for the device. None for an
    asynchronous pipeline, whose phases overlap."""
    attention: dict[str, Any] | None
    """The chosen kernel, and the milliseconds of those tried; None if there was no choice."""
    kernels: KernelTimes | None
    """On request."""
    traces: list[str]
    """On request: a file per rank, for Perfetto; empty if they could not be written."""
    predicted: list[dict[str, Any]]
    """The planner's predictions of the step, its parts and its memory, with the measured values; empty if it cannot
    predict the job."""
    uncompiled: str | None = None
    """Says that no block was compiled although all should be, and why; None if any was."""
    prediction_note: str | None = None
    """How the CPU's profile was measured, if not as this run uses the CPU."""


def bench(
    job: Job,
    corpus: Corpus,
    world: World,
    *,
    steps: int,
    warmup: int,
    profile: bool = False,
    trace: Path | None = None,
    nvtx: bool = False,
) -> Bench:
    """Train `warmup` + `steps` steps and time the latter; then profile a few more. A CUDA graph is captured before.

    With `trace` every rank writes a trace of the last steps into that folder, or with `nvtx` marks them for nsys.
    """
    if steps < 1 or warmup < 1:
        raise UserError(
            f"--steps {steps} and --warmup {warmup} must both be at least 1; correct them (the first step compiles)"
        )
    if trace is not None:
        require_traceable(job)
        if nvtx:
            require_nvtx(world.device)
    warmup = max(warmup, steps_until_captured(job, world))
    extra = PHASE_STEPS + (PROFILE_STEPS if profile else 0) + (TRACE_STEPS if trace is not None else 0)
    timed_job = _without_evaluation(job, warmup + steps + extra)
    loader = training_loader(timed_job, corpus, world)
    loader.start()
    watch = _Watch(warmup, warmup + steps, world.device, profile)
    watch.attention = choose_attention(timed_job, world)
    engine, weights = build(timed_job, world)
    training = make_trainer(timed_job, corpus, engine, weights, watch, watch, world)
    if job.prefers:
        training.refer_to(BLANK)
    if not is_asynchronous(job):  # whose stages have their own phases
        watch.phases = Phases(training)
    last = timed_job.run.steps
    if trace is not None:
        training.trace(TraceSteps(last - TRACE_STEPS + 1, last, nvtx), trace, partial(_warn, world.rank))
    outcome = training.run(loader=loader)
    world.barrier()  # every rank's trace is written
    traces = [] if trace is None else [str(path) for path in traces_in(trace)]
    return _summary(timed_job, world, watch, warmup, steps, outcome, traces)


def _warn(rank: int, sentence: str) -> None:
    sys.stderr.write(f"warning: rank {rank}: {sentence}\n")


def _without_evaluation(job: Job, steps: int) -> Job:
    evaluation = job.evaluation.model_copy(update={"every_steps": 0})
    run = job.run.model_copy(update={"steps": steps})
    return job.model_copy(update={"evaluation": evaluation, "run": run})


class _Watch(Silent):
    """Recorder and progress of a measured run: keeps the rows, and starts each kind of measurement when it is due."""

    def __init__(self, timed_after: int, timed_until: int, device: torch.device, profile: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.attention: dict[str, Any] | None = None
        self.phases: Phases | None = None
        self.kernels = Kernels(device) if profile else None
        self.reserved: int | None = None
        self.used: int | None = None
        self.timed_s = 0.0
        self._began = 0.0
        self._timed_after, self._timed_until, self._device = timed_after, timed_until, device

    def metric(self, row: dict[str, Any]) -> None:
        """After every step."""
        self.rows.append(row)
        step = row["step"]
        if step == self._timed_after:
            self._began = time.perf_counter()
        if step == self._timed_until:
            self.timed_s = time.perf_counter() - self._began
            if self._device.type == "cuda":
                free, total = torch.cuda.mem_get_info(self._device)
                self.reserved, self.used = torch.cuda.max_memory_reserved(), total - free
            if self.phases is not None:
                self.phases.begin()
        if step == self._timed_until + PHASE_STEPS:
            if self.phases is not None:
                self.phases.end()
            if self.kernels is not None:
                self.kernels.begin()
        if self.kernels is not None and step == self._timed_until + PHASE_STEPS + PROFILE_STEPS:
            self.kernels.end(PROFILE_STEPS)


def _summary(
    job: Job, world: World, watch: _Watch, warmup: int, steps: int, outcome: Outcome, traces: list[str]
) -> Bench:
    timed = watch.rows[warmup : warmup + steps]
    spread = spread_of([row["step_s"] for row in timed])
    tokens_per_s = job.tokens_per_step / spread.median
    peak = device_peak_flops(job, world.device)

    def share(flops: float | None) -> float | None:
        return None if peak is None or flops is None else tokens_per_s * flops / (peak * world.size)

    own, sequence = job.model.file is not None, job.batch.sequence_length
    return Bench(
        device=device_name(world.device),
        devices=world.size,
        torch=torch.__version__,
        parameters=count_parameters(job.model),
        warmup=warmup,
        steps=steps,
        tokens_per_step=job.tokens_per_step,
        first_step_s=watch.rows[0]["step_s"],
        timed_s=watch.timed_s,
        step_s=spread,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / world.size,
        mfu=share(None if own else flops_per_token(job.model, sequence, "full")),
        mfu_causal=share(None if own else flops_per_token(job.model, sequence, "causal")),
        hfu=share(None if own else executed_flops_per_token(job)),
        peak_memory_bytes=timed[-1]["memory_bytes"],
        steady_memory_bytes=outcome.steady_memory_bytes,
        reserved_memory_bytes=watch.reserved,
        device_memory_bytes=watch.used,
        data_wait_share=sum(row["data_wait_s"] for row in timed) / sum(row["step_s"] for row in timed),
        losses=[row["loss"] for row in timed],
        phases_s=None if watch.phases is None else watch.phases.medians(),
        attention=watch.attention,
        kernels=None if watch.kernels is None else watch.kernels.times,
        traces=traces,
        predicted=_predicted(job, world, spread.median, timed[-1]["memory_bytes"], watch.phases),
        uncompiled=outcome.uncompiled,
        prediction_note=_profiled_otherwise(world),
    )


def _profiled_otherwise(world: World) -> str | None:
    """Whether the profile that a prediction for this CPU uses is of other ranks or threads than these."""
    profile = profile_of(CPU, world.size) if world.device.type == "cpu" else None
    threads = torch.get_num_threads()
    if profile is None or (profile.ranks, profile.units) == (world.size, threads):
        return None
    nproc = f" --nproc {world.size}" if world.size > 1 else ""
    return (
        f"predicted from a profile of {profile.ranks} × {profile.units} threads of this CPU, but this run has "
        f"{world.size} × {threads}; meshwright calibrate{nproc}, with the same OMP_NUM_THREADS, measures that"
    )


def _predicted(
    job: Job, world: World, step_s: float, peak_bytes: int | None, phases: Phases | None
) -> list[dict[str, Any]]:
    parts = None if phases is None else phases.medians()
    terms = compare_with_plan(job, device_name(world.device), world.size, step_s, peak_bytes, parts)
    return [{**asdict(term), "error": term.error} for term in terms]


def spread_of(values: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile, minimum and maximum."""
    ordered = sorted(values)
    tenth = (len(ordered) - 1) / 10
    return Spread(
        statistics.median(ordered), ordered[int(tenth)], ordered[round(9 * tenth + 0.49)], ordered[0], ordered[-1]
    )


def executed_flops_per_token(job: Job) -> float:
    """FLOPs of products and full attention per token, including what is recomputed in backward."""
    table = table_of(job) if job.layout.pp > 1 and not is_asynchronous(job) else None
    modes: dict[int, Mode] = {}
    for rank in range(job.layout.pp if table else 1):
        modes |= recompute_modes(job, table, rank)
    cost = decoder_cost(job.model, 1, job.batch.sequence_length, job.precision.number_bytes, modes)
    return float(cost.forward_flops + cost.backward_flops) / job.batch.sequence_length
