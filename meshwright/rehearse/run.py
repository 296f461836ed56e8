"""A rehearsal: the ranks that are asked for, one after another, and what they show together."""

from collections.abc import Callable
from dataclasses import replace

import torch

from meshwright.errors import UserError
from meshwright.hardware import completed
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.layout import device_of_check, ranks_of, require_layout, resolve_auto
from meshwright.plan import any_machines, check_target, machine_of, predict, spelled
from meshwright.ranks import own_place
from meshwright.rehearse.apart import rehearse_apart
from meshwright.rehearse.compose import compose
from meshwright.rehearse.kinds import Kind, kind_of, kinds_of_ranks
from meshwright.rehearse.rank import Rehearsed, Settings
from meshwright.rehearse.result import Rehearsal, RehearsedRank
from meshwright.rehearse.words import rank_words
from meshwright.train import capabilities_here

DIFFERS = 1.05
"""Stages whose compute differs by more than this are warned about: the others wait for the slowest."""

LIMITS = (
    "no numerics: losses and gradients mean nothing here; meshwright verify checks them",
    "no NCCL: its buffers, its choice of algorithm and its share of the GPU are modelled, not measured",
    "no stragglers: every rank is taken to be as fast as this one, and no link slower than its datasheet",
)
_EXPERTS = "no imbalance between ranks with experts: the others send this rank as many tokens as it sends itself"


def rehearse(
    job: Job,
    *,
    cluster: str | None = None,
    rank: int | None = None,
    each_stage: bool = False,
    steps: int = 3,
    warmup: int = 2,
    profile: bool = False,
    checkpoint: bool = True,
    report: Callable[[str], None] = lambda sentence: None,
) -> Rehearsal:
    """Run one rank of the job's world on this machine's device, or one of each kind, each in its own process.

    Without a rank it is the one that the plan says is fullest. Without `checkpoint` none is written. `report` is called
    with what is about to run.
    """
    size = _require_world(job, rank, each_stage, warmup)
    target = _target(job, cluster)
    job = resolved_for_rehearsal(job, cluster)
    gpus_per_node = 8 if target is None else target.gpus_per_node
    settings = Settings(steps, warmup, profile, gpus_per_node, checkpoint=checkpoint)
    kinds = kinds_of_ranks(job) if each_stage else [_asked(job, rank)]
    found: list[Rehearsed] = []
    for kind in kinds:
        report(f"rank {kind.rank} of {size}{_in_words(kind)}")
        found.append(_rehearsed(job, kind, settings, target))
    ranks = tuple(replace(one.rank, place=kind.name) for kind, one in zip(kinds, found, strict=True))
    warnings = dict.fromkeys(sentence for one in found for sentence in one.warnings)
    step, said = (None, ()) if target is None else compose(job, target, ranks, found[0].device)
    return Rehearsal(
        world=size,
        cluster="" if target is None else spelled(target),
        device=found[0].device,
        torch=torch.__version__,
        ranks=ranks,
        step=step,
        warnings=(*warnings, *_differences(size, kinds, ranks), *said),
        limits=limits_of(job),
    )


def resolved_for_rehearsal(job: Job, cluster: str | None) -> Job:
    """The job in the formats of the cluster that it is for, compiled only where this machine's device compiles."""
    return resolve_auto(job, device_of_check(_target(job, cluster) or job.cluster, capabilities_here(job)))


def limits_of(job: Job) -> tuple[str, ...]:
    """What a rehearsal of this job cannot show, in sentences."""
    return (*LIMITS, _EXPERTS) if job.layout.ep > 1 else LIMITS


def _require_world(job: Job, rank: int | None, each_stage: bool, warmup: int) -> int:
    size = ranks_of(job.layout)
    if size == 1:
        raise UserError("layout has one rank, so that there is nothing to rehearse; meshwright bench measures it")
    if own_place() is not None:
        raise UserError("rehearse is one process, but this is a rank of torchrun or srun; start it without them")
    if rank is not None and each_stage:
        raise UserError(f"--rank {rank} and --each-stage exclude each other; leave one of them out")
    if rank is not None and not 0 <= rank < size:
        raise UserError(f"--rank {rank} is not in the job's world of {size} ranks; give one from 0 to {size - 1}")
    if warmup < 2:
        raise UserError(f"--warmup {warmup} must be at least 2 (the second step is the first with optimizer states)")
    require_layout(job, size)
    if job.layout.async_tp:
        raise UserError(
            "layout.async_tp = true sends through memory that GPUs share, and a rehearsal has one; rehearse it with "
            "--set layout.async_tp=false"
        )
    return size


def _target(job: Job, spelling: str | None) -> Cluster | None:
    """The cluster that the job is for; None if neither it nor the command names one."""
    if spelling is None and (job.cluster.name or job.cluster.gpu) is None:
        return None
    target = check_target(job, spelling)[0] if spelling is not None else completed(job.cluster, ranks_of(job.layout))
    if (gpus := target.nodes * target.gpus_per_node) != ranks_of(job.layout):
        raise UserError(
            f"layout needs {ranks_of(job.layout)} ranks, but the cluster has {gpus} GPUs; name one of "
            f"{ranks_of(job.layout)} with --cluster or change the layout"
        )
    return target


def _asked(job: Job, rank: int | None) -> Kind:
    if rank is not None:
        return kind_of(job, rank)
    kinds = kinds_of_ranks(job)
    if len(kinds) == 1:
        return kinds[0]
    try:
        memory = predict(job, any_machines(ranks_of(job.layout))).memory
    except UserError:  # the planner does not know this job
        return kinds[0]
    return max(kinds, key=lambda kind: memory[kind.pipeline_rank].allocated)


def _in_words(kind: Kind) -> str:
    return f" ({kind.name})" if kind.name else ""


def _rehearsed(job: Job, kind: Kind, settings: Settings, target: Cluster | None) -> Rehearsed:
    """One rank, within the memory of the cluster's devices if this one has more.

    A rank that does not fit there is run once more with all of this device's memory, to say what it needs.
    """
    limit = None if target is None else _limit(job, kind, target)
    found = rehearse_apart(job, kind.rank, kind.alike, replace(settings, limit_bytes=limit))
    if found.rank.state == "measured" and limit is not None and not found.limited:
        return _held_to(found, limit)
    if found.rank.state == "measured" or not found.limited:
        return found
    whole = rehearse_apart(job, kind.rank, kind.alike, settings)
    if whole.rank.memory is None:
        return whole
    needed = max(whole.rank.memory.allocated_bytes, found.rank.needed_bytes or 0)
    asked, idle = found.rank.asked_bytes, found.rank.idle_bytes
    short = replace(whole.rank, state="out of memory", needed_bytes=needed, asked_bytes=asked, idle_bytes=idle)
    return replace(whole, rank=short)


def _held_to(found: Rehearsed, limit: int) -> Rehearsed:
    """A rank of a device that cannot be limited, such as a CPU: out of memory if its tensors alone are too many."""
    if found.rank.memory is None or found.rank.memory.allocated_bytes <= limit:
        return found
    needed = found.rank.memory.allocated_bytes
    return replace(found, rank=replace(found.rank, state="out of memory", needed_bytes=needed))


def _limit(job: Job, kind: Kind, target: Cluster) -> int | None:
    """What the allocator gets of a GPU of the cluster: not what drivers and communicators take; None if unknown."""
    try:
        machine = machine_of(target)
        outside = predict(job, machine).memory[kind.pipeline_rank].outside
    except UserError:
        return None
    return None if machine.on_cpu else int(machine.memory_bytes - outside)


def _differences(world: int, kinds: list[Kind], ranks: tuple[RehearsedRank, ...]) -> list[str]:
    """Stages that differ: in compute, since all wait for the slowest, and in what they hold."""
    sentences = []
    for kind in kinds:
        if kind.fewer:
            which = ", ".join(map(str, kind.fewer))
            sentences.append(
                f"rank {kind.rank} stands for the stages on pipeline rank {which} too, where fewer micro-batches are "
                "in flight and less memory is held"
            )
    timed = sorted((rank for rank in ranks if rank.state == "measured"), key=lambda rank: rank.step_s)
    if by_stage := list({rank.pipeline_rank: rank for rank in timed}.values()):
        slow, fast = max(by_stage, key=lambda rank: rank.step_s), min(by_stage, key=lambda rank: rank.step_s)
        if slow.step_s > DIFFERS * fast.step_s:
            words = [rank_words(rank, world) for rank in (slow, fast)]
            sentences.append(
                f"{words[0]} computes {slow.step_s / fast.step_s - 1:.0%} longer than {words[1]}, which waits for it; "
                "layout.split moves layers between stages"
            )
    return sentences
