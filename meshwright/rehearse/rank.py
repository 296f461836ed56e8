"""One rank of a job's whole world in this process: built, run and measured by the code that trains it.

Only the process group is another one, in which the other ranks' messages are replaced (`group.py`). What a rank decides
with the others at its start (tests of links, waits for stragglers) is left out: there is nobody to test.
"""

import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint import Lease, Saver
from meshwright.data import Corpus
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.data import Data
from meshwright.layout import is_asynchronous, ranks_of, table_of
from meshwright.parallel import World, build, host_buffer, join_world
from meshwright.rehearse.group import NAME, RehearsedGroup, register
from meshwright.rehearse.messages import count_messages
from meshwright.rehearse.planned import planned_memory
from meshwright.rehearse.result import RankMemoryUse, RehearsedRank
from meshwright.rehearse.watch import Plan, Watch
from meshwright.train import (
    BLANK,
    Trainer,
    choose_attention,
    choose_device,
    device_name,
    make_trainer,
    open_corpus,
    prepare_device,
    training_loader,
)
from meshwright.verify.collectives import Writer, read_one, record_groups

_ASKED = re.compile(r"Tried to allocate ([\d.]+) (\w+)")
_HAD = re.compile(r"([\d.]+) (\w+) is allocated by PyTorch")
_IDLE = re.compile(r"([\d.]+) (\w+) is reserved(?: by PyTorch)? but unallocated")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""What torch's errors say of the memory that was asked for, of that in use and of that free in pieces."""


@dataclass(frozen=True)
class Settings:
    """How ranks are rehearsed."""

    steps: int
    warmup: int
    profile: bool = False
    gpus_per_node: int = 8
    limit_bytes: int | None = None
    """What the allocator may take of the device, where the cluster's devices have less than this one."""
    checkpoint: bool = True
    """Whether the rank also writes its share of a checkpoint, which takes up to 12 bytes per parameter on the disk."""


@dataclass(frozen=True)
class Rehearsed:
    """A rank's measurements, the device they were taken on, and what else there is to say."""

    rank: RehearsedRank
    device: str
    warnings: tuple[str, ...]
    limited: bool = False
    """Whether the device has more memory than the rank was given."""


def rehearse_rank(job: Job, rank: int, alike: int, settings: Settings) -> Rehearsed:
    """Run one rank of the job's world in this process, which is not used for anything else."""
    plan = Plan(settings.warmup, settings.steps, settings.profile and not is_asynchronous(job))
    job = for_rehearsal(job, plan.total)
    device = choose_device(job)
    prepare_device(job, device)
    limited = _limit_memory(device, settings.limit_bytes)
    with tempfile.TemporaryDirectory(prefix="meshwright-rehearse-") as folder:
        writer = join_alone(rank, ranks_of(job.layout), settings.gpus_per_node, Path(folder))
        world = join_world(job, device)
        job, corpus, warnings = _with_data(job)
        watch = Watch(plan, device, writer)
        try:
            training = run_measured(job, corpus, world, watch)
        except torch.OutOfMemoryError as error:
            return Rehearsed(_out_of_memory(job, world, alike, error), device_name(device), warnings, limited)
        operations = read_one(Path(folder), rank).operations
        saved_bytes, saved_s, why_not = (None, None, None)
        if settings.checkpoint:
            saved_bytes, saved_s, why_not = _write_checkpoint(job, training, Path(folder))
    warnings += tuple(dict.fromkeys(watch.messages)) + (() if why_not is None else (why_not,))
    if job.run.compiles and device.type == "cpu":
        warnings += ("memory is of weights, gradients and states only: compiled code on a CPU shows no activations",)
    measured = RehearsedRank(
        rank=rank,
        pipeline_rank=world.axis_rank("pp"),
        stages=_stages(job, world),
        alike=alike,
        state="measured",
        steps=plan.steps,
        step_s=watch.step_s,
        phases_s=watch.phases_s,
        actions_s=watch.actions_s,
        kernels=watch.kernels,
        memory=_memory(job, world, watch),
        needed_bytes=None,
        messages=count_messages(operations, job, world, plan.total if is_asynchronous(job) else 1),
        checkpoint_bytes=saved_bytes,
        checkpoint_s=saved_s,
    )
    return Rehearsed(measured, device_name(device), warnings, limited)


def _limit_memory(device: torch.device, limit_bytes: int | None) -> bool:
    """Give the allocator no more than this; False if the device has no more anyway."""
    if limit_bytes is None or device.type != "cuda":
        return False
    whole = torch.cuda.get_device_properties(device).total_memory
    if limit_bytes >= whole:
        return False
    torch.cuda.set_per_process_memory_fraction(limit_bytes / whole, device)
    return True


def for_rehearsal(job: Job, steps: int) -> Job:
    """The job with so many steps, no evaluation and first weights of its own; numbers without meaning stop nothing."""
    run = job.run.model_copy(update={"steps": steps, "on_bad_step": "keep", "spike_score": 0.0})
    return job.model_copy(
        update={
            "evaluation": job.evaluation.model_copy(update={"every_steps": 0, "sets": {}}),
            "run": run,
            "model": job.model.drawn,
        }
    )


def join_alone(rank: int, size: int, gpus_per_node: int, folder: Path) -> Writer:
    """Make this process a rank of a world in which it is alone; what it issues is recorded once the writer is on."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0")
    os.environ["LOCAL_WORLD_SIZE"] = str(min(size, gpus_per_node))
    register()
    writer = record_groups(folder, rank, {NAME: RehearsedGroup})
    writer.on = False
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(NAME, store=store, rank=rank, world_size=size)
    return writer


def _with_data(job: Job) -> tuple[Job, Corpus, tuple[str, ...]]:
    """The job with its own data, or with synthetic tokens if that is not on this machine."""
    try:
        return job, open_corpus(job), ()
    except UserError as error:
        names = ("cache", "mask_documents", "pin_memory", "prefetch", "workers")
        data = Data(sources=("builtin:synthetic",), **{name: getattr(job.data, name) for name in names})
        job = job.model_copy(update={"data": data})
        return job, open_corpus(job), (f"tokens are synthetic, since the job's data cannot be read here: {error}",)


def run_measured(
    job: Job, corpus: Corpus, world: World, watch: Watch, attention: dict[str, Any] | None = None
) -> Trainer:
    """As `bench` does: the loader's processes first, then the model, then the loop, which the watch is attached to.

    `attention` is the kernel that `choose_attention` has chosen before; without it the fastest is measured here.
    """
    loader = training_loader(job, corpus, world)
    loader.start()
    choose_attention(job, World(world.device), attention)  # rank 0 measures for all, and is not here
    engine, weights = build(job, world)
    training = make_trainer(job, corpus, engine, weights, watch, watch, world)
    if job.prefers:
        training.refer_to(BLANK)
    training._overflowed = lambda *numbers: False  # type: ignore[method-assign]
    watch.attach(training)
    training.run(loader=loader)
    return training


def _stages(job: Job, world: World) -> tuple[int, ...]:
    return tuple(table_of(job).stages_of(world.axis_rank("pp"))) if job.layout.pp > 1 else (0,)


def _memory(job: Job, world: World, watch: Watch) -> RankMemoryUse | None:
    kinds, reserved, used = watch.by_kind, None, None
    allocated = sum(kinds.values()) if watch.peak_bytes is None else watch.peak_bytes
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        reserved, used = torch.cuda.max_memory_reserved(world.device), total - free
    elif not kinds:
        return None
    planned = planned_memory(job, world.axis_rank("pp"), on_cpu=world.device.type == "cpu")
    return RankMemoryUse(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=used,
        by_kind=kinds,
        planned_bytes=None if planned is None else sum(planned.terms.values()),
        planned_reserved_bytes=None if planned is None or reserved is None else planned.reserved,
        planned_terms={} if planned is None else planned.terms,
    )


def _write_checkpoint(job: Job, training: Trainer, folder: Path) -> tuple[int | None, float | None, str | None]:
    """Bytes and seconds of this rank's share of a checkpoint, written and removed; or why it cannot be written."""
    often = job.checkpoint.model_copy(update={"every_steps": 1, "backup_to": None})
    world, reports = training.world, list[str]()
    lease = Lease.claim(folder)
    saver = Saver(
        job.model_copy(update={"checkpoint": often}),
        lease,
        lambda *event, **fields: None,
        reports.append,
        lambda size: host_buffer(size, torch.uint8, world.device),
        rank=world.rank,
        ranks=world.size,
        sums=lambda values: [0.0 for _ in values],  # nobody else writes: nothing is ever complete
    )
    began = time.perf_counter()
    saver.after_step(training.outcome.step, training.capture)
    saver.settle()
    seconds = time.perf_counter() - began
    if failures := list(lease.folder.rglob("failed-*")):
        return None, None, f"this rank's share of a checkpoint could not be written ({failures[0].read_text()})"
    return sum(file.stat().st_size for file in lease.folder.rglob("*") if file.is_file()), seconds, None


def _out_of_memory(job: Job, world: World, alike: int, error: torch.OutOfMemoryError) -> RehearsedRank:
    asked, idle = _said(_ASKED, error), _said(_IDLE, error)
    return RehearsedRank(
        rank=world.rank,
        pipeline_rank=world.axis_rank("pp"),
        stages=_stages(job, world),
        alike=alike,
        state="out of memory",
        steps=0,
        step_s=0.0,
        phases_s={},
        actions_s={},
        kernels=None,
        memory=None,
        needed_bytes=_said(_HAD, error) + idle + asked,
        messages=(),
        checkpoint_bytes=None,
        checkpoint_s=None,
        asked_bytes=asked,
        idle_bytes=idle,
    )


def _said(what: re.Pattern[str], error: torch.OutOfMemoryError) -> int:
    """Bytes in an error's text: by the time that it is caught, much of what was there is freed."""
    found = what.search(str(error))
    return 0 if found is None else round(float(found[1]) * _UNITS.get(found[2], 1))
