"""Measure a job's loader alone, and how much of a training step waits for it."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from meshwright.data import Corpus, Loader, StreamLoader
from meshwright.data.stages import stages_timed
from meshwright.job import Job
from meshwright.measure.bench import bench
from meshwright.parallel import World
from meshwright.train import device_name, training_loader

LEAST_S = 1.0
"""A loader is timed for about so long at least: text takes less than a millisecond per step."""
_MOST_STEPS, _STEPS_PER_WORKER = 10_000, 4
_STAGE_STEPS, _STAGE_SAMPLES = 4, 64
OTHER = "batch"
"""What no other stage counts: stacking samples, masks of documents, normalised pixels."""


@dataclass(frozen=True)
class DataBench:
    """How fast a job's loader is, and how long its steps wait. A sample is a sequence; rates are over all ranks."""

    device: str
    devices: int
    cores: int
    """That this machine's processes may use."""
    workers: int
    """Of each rank."""
    prefetch: int
    decode: str | None
    """Where items are decoded; None for text."""
    warmup: int
    steps: int
    timed_s: float
    """Of the slowest rank."""
    samples_per_step: int
    samples_per_s: float
    tokens_per_s: float
    """Without padding."""
    items_per_s: float | None
    """Pictures, frames and windows of sound; None for text."""
    cpu_s_per_1000_samples: float | None
    """CPU time of the processes that read, all cores and ranks together; None if the system does not report it."""
    stages_s: dict[str, float]
    """Seconds per 1,000 samples by stage, read in one process without workers."""
    lost_items: int
    """Of the first rank that could not be decoded."""
    step_s: float | None
    """Of a training step without its wait for data; None if there is no step."""
    step_from: str
    """How step_s is known: `measured`, `given`, or why there is none."""
    needed_samples_per_s: float | None
    """What training takes when it never waits."""
    data_wait_share: float | None
    """Fraction of a step's time: measured in training, or by arithmetic from the given step."""


@dataclass(frozen=True)
class _Rates:
    """What the loader alone gives."""

    warmup: int
    steps: int
    seconds: float
    tokens: int
    items: int
    cpu_s: float | None
    lost: int


def bench_data(
    job: Job,
    corpus: Corpus,
    world: World,
    *,
    steps: int,
    warmup: int,
    step_s: float | None = None,
    no_step: str | None = None,
) -> DataBench:
    """Time the loader without training, then training with it, unless a step's time is given or there is no step."""
    rates = _alone(job, corpus, world, steps, warmup)
    stages = _stages(job, corpus, world) if world.rank == 0 else {}
    world.barrier()
    each_s, known, share = step_s, "given", None
    if step_s is not None:
        share = wait_share(rates.seconds / rates.steps, step_s, job.data.workers)
    elif no_step is not None:
        known = no_step
    else:
        run = bench(job, corpus, world, steps=steps, warmup=warmup)
        known, share = "measured", run.data_wait_share
        each_s = run.step_s.median * (1 - share)
    samples = rates.steps * job.batch.global_batch
    return DataBench(
        device=device_name(world.device),
        devices=world.size,
        cores=cores(),
        workers=job.data.workers,
        prefetch=job.data.prefetch,
        decode=job.data.decode if job.data.fields else None,
        warmup=rates.warmup,
        steps=rates.steps,
        timed_s=rates.seconds,
        samples_per_step=job.batch.global_batch,
        samples_per_s=samples / rates.seconds,
        tokens_per_s=rates.tokens / rates.seconds,
        items_per_s=rates.items / rates.seconds if rates.items else None,
        cpu_s_per_1000_samples=None if rates.cpu_s is None else 1000 * rates.cpu_s / samples,
        stages_s=stages,
        lost_items=rates.lost,
        step_s=each_s,
        step_from=known,
        needed_samples_per_s=None if not each_s else job.batch.global_batch / each_s,
        data_wait_share=share,
    )


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wait_share(loading_s: float, step_s: float, workers: int) -> float:
    """The fraction of time that a step waits, if its data takes so long: workers read while it computes, and without
    any it waits for all of it."""
    wait_s = loading_s if workers == 0 else max(0.0, loading_s - step_s)
    return wait_s / (step_s + wait_s) if wait_s else 0.0


def _alone(job: Job, corpus: Corpus, world: World, steps: int, warmup: int) -> _Rates:
    """Steps taken as fast as they come; every rank takes as many."""
    loader = training_loader(job, corpus, world)
    try:
        # Workers start in the first step; each has read one of its own before the clock starts.
        warmup = max(warmup, job.data.workers) + 1
        next(loader)
        began = time.perf_counter()
        for _ in islice(loader, warmup - 1):
            pass
        each_s = max(_of_all(world, (time.perf_counter() - began) / (warmup - 1)))
        count = max(steps, _STEPS_PER_WORKER * job.data.workers, min(_MOST_STEPS, math.ceil(LEAST_S / each_s)))
        world.barrier()
        cpu_s, began = _cpu_s(loader), time.perf_counter()
        tokens = items = 0
        for step in islice(loader, count):
            tokens += step.tokens
            if (media := step.batch.media) is not None:
                items += int((media.places_BKT[..., 0] >= 0).sum())
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds, spent_s = time.perf_counter() - began, _cpu_s(loader)
        lost = loader.lost_items if isinstance(loader, Loader) else 0
    finally:
        loader.close()
    cpus = _of_all(world, -1.0 if cpu_s is None or spent_s is None else spent_s - cpu_s)
    return _Rates(
        warmup,
        count,
        max(_of_all(world, seconds)),
        tokens,
        round(world.sum_over_world([float(items) if world.leads_data else 0.0])[0]),
        None if min(cpus) < 0 else sum(cpus),
        lost,
    )


def _of_all(world: World, value: float) -> Sequence[float]:
    """Every rank's value."""
    return world.sum_over_world([value if rank == world.rank else 0.0 for rank in range(world.size)])


def _cpu_s(loader: Loader | StreamLoader) -> float | None:
    """CPU time so far of this process and of the loader's workers, in user and system mode."""
    try:
        # The name in parentheses may hold spaces; times are the 12th and 13th number behind it.
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in loader.readers.processes]
    except OSError:
        return None
    ticks = sum(int(stat[11]) + int(stat[12]) for stat in stats)
    return time.process_time() + (ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0)


def _stages(job: Job, corpus: Corpus, world: World) -> dict[str, float]:
    """Seconds per 1,000 samples by stage: small steps in this process, since workers would each need a clock.

    A stream reads and tokenises ahead of what it gives, so that its first step counts too.
    """
    batch = job.batch.model_copy(update={"global_batch": min(_STAGE_SAMPLES, job.batch.global_batch)})
    data = job.data.model_copy(update={"workers": 0})
    loader = training_loader(job.model_copy(update={"batch": batch, "data": data}), corpus, World(world.device))
    taken = 0
    try:
        if corpus.flow is None:
            next(loader)  # opens files
        began = time.perf_counter()
        with stages_timed() as stages:
            for taken, _ in enumerate(loader, start=1):
                if taken == _MOST_STEPS or (taken >= _STAGE_STEPS and time.perf_counter() - began > LEAST_S):
                    break
        whole_s = time.perf_counter() - began
    finally:
        loader.close()
    scale = 1000 / (taken * batch.global_batch)
    found = {name: seconds * scale for name, seconds in stages.seconds.items()}
    return found | {OTHER: max(0.0, whole_s * scale - sum(found.values()))}
