"""A rehearsal as evidence for a plan: what is known of a job because its ranks were run, and what stays predicted.

A rehearsal says something of the same job only: same model, layout, batch, precision, memory settings and torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.plan import ErrorBars, Prediction, RankMemory
from meshwright.rehearse.compose import compose
from meshwright.rehearse.faster import is_same_gpu
from meshwright.rehearse.result import Rehearsal, RehearsedRank, RehearsedStep

_WHOLE = ("model", "layout", "batch", "precision", "memory")
"""Sections in which every field changes what a rank holds or computes."""
_FIELDS = (("optimizer", "name"), ("run", "compile"))
_ELSEWHERE = {"model": ("init_from",)}
"""Fields of such sections that change only numbers."""


def mismatches(job: Job, rehearsed: Job, rehearsal: Rehearsal) -> list[str]:
    """What differs between a job and a rehearsed one, so that the rehearsal says nothing of it; each as a phrase."""
    own, its = (dict(_told(one)) for one in (job, rehearsed))
    differing = [name for name in own if own[name] != its[name]]
    found = [f"{name} is {own[name]}, and was {its[name]}" for name in differing]
    places = {rank.pipeline_rank for rank in rehearsal.ranks if rank.pipeline_rank >= rehearsed.layout.pp}
    found += [f"it has a rank at place {place} of a pipeline of {rehearsed.layout.pp}" for place in sorted(places)]
    here = _torch_here()
    if here is not None and here != _release(rehearsal.torch):
        found.append(f"torch is {here}, and was {rehearsal.torch}")
    return found


def _told(job: Job) -> Iterator[tuple[str, Any]]:
    for section in _WHOLE:
        fields = getattr(job, section).model_dump(mode="json")
        yield from ((f"{section}.{name}", fields[name]) for name in fields if name not in _ELSEWHERE.get(section, ()))
    yield from ((f"{section}.{name}", getattr(getattr(job, section), name)) for section, name in _FIELDS)


def _torch_here() -> str | None:
    """The release of torch that is installed; None if none is."""
    try:
        return _release(version("torch"))
    except PackageNotFoundError:
        return None


def _release(torch: str) -> str:
    """Builds for other devices count as the same."""
    return torch.partition("+")[0]


@dataclass(frozen=True)
class Evidence:
    """A job's plan with its rehearsal."""

    rehearsal: Rehearsal
    prediction: Prediction
    step: RehearsedStep | None
    """On the machines that the plan is for; None if ranks of the rehearsal make no step."""
    known_bytes: dict[int, float]
    """By pipeline rank that was rehearsed: what its device holds, with the driver and communicators as planned."""
    step_s: tuple[float, float]
    device_bytes: tuple[float, float]
    """Intervals of the step and of the fullest device, narrower than the plan's by what is known."""
    same_gpu: bool
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether it fits, if that is known; None if only the plan says so."""
        low, high = self.device_bytes
        capacity = self.prediction.capacity_bytes
        return True if high <= capacity else False if low > capacity else None


def evidence(job: Job, cluster: Cluster, prediction: Prediction, bars: ErrorBars, rehearsal: Rehearsal) -> Evidence:
    """What a rehearsal of this very job says of it on these machines.

    Memory of a rehearsed rank is measured, and so is compute on the same GPU. The modelled rest of a step is taken to
    be as far off as whole predictions are; no cluster has confirmed that yet.
    """
    step, warnings = compose(job, cluster, rehearsal.ranks, rehearsal.device)
    same = is_same_gpu(cluster, rehearsal.device)
    known = dict(sorted(_known(rehearsal.ranks, prediction), key=lambda one: one[1]))  # the fullest of each place
    low, high = bars.relative_time
    times = bars.step_s
    if step is not None:
        measured = step.measured_s if same else 0.0
        rest = step.step_s - measured
        times = measured + rest * low, measured + rest * high
    held = _interval(prediction, bars, rehearsal.ranks, known)
    return Evidence(rehearsal, prediction, step, known, times, held, same, warnings)


def _known(ranks: tuple[RehearsedRank, ...], prediction: Prediction) -> Iterator[tuple[int, float]]:
    """Device memory by pipeline rank: what the allocator took, or after a CPU what a GPU's would for as many bytes."""
    for rank in ranks:
        planned = prediction.memory[rank.pipeline_rank]
        if rank.memory is not None and rank.state == "measured":
            missing = planned.allocated - (rank.memory.planned_bytes or planned.allocated)  # libraries' workspaces
            on_a_gpu = rank.memory.allocated_bytes + missing + planned.fragments + planned.gap
            yield rank.pipeline_rank, (rank.memory.reserved_bytes or on_a_gpu) + planned.outside


def _interval(
    prediction: Prediction, bars: ErrorBars, ranks: tuple[RehearsedRank, ...], known: dict[int, float]
) -> tuple[float, float]:
    """The fullest device: of rehearsed ranks the known value, at least that of one that ran out, else as predicted."""
    low, high = (end / prediction.fullest.device for end in bars.device_bytes)
    failed = sorted((rank.needed_bytes or 0, rank.pipeline_rank) for rank in ranks if rank.state == "out of memory")
    short = {place: float(needed) for needed, place in failed}

    def ends(planned: RankMemory) -> tuple[float, float]:
        if planned.rank in known and planned.rank not in short:
            return known[planned.rank], known[planned.rank]
        least = short[planned.rank] + planned.outside if planned.rank in short else 0.0
        return max(least, planned.device * low), max(least, planned.device * high)

    each = [ends(planned) for planned in prediction.memory]
    return max(one[0] for one in each), max(one[1] for one in each)
