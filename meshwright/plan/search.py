"""The fastest layouts of a model on a machine: a bound for all of them, a prediction for those that may be the best."""

from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from math import sqrt
from time import process_time

import numpy as np

from meshwright.errors import UserError
from meshwright.job import Job, Model
from meshwright.job.devices import Cluster, Segments
from meshwright.layout import require_layout
from meshwright.plan.bound import ALLOWED, Layouts, bounded, families_of, job_at
from meshwright.plan.machine import machine_of
from meshwright.plan.memory import block_bytes
from meshwright.plan.predict import Prediction, memory_of, own_software, predict

SAFE = 0.95
"""Fraction of a GPU's memory a layout may be predicted to use: predictions err, and drivers reserve some of it."""
_PREDICTED = 200
_MISSES = 3


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction."""

    job: Job
    prediction: Prediction


@dataclass(frozen=True)
class Search:
    """What was found."""

    best: tuple[Candidate, ...]
    """Layouts that fit, fastest first."""
    misses: tuple[Candidate, ...]
    """Layouts that would be faster than the best and do not fit, the smallest first."""
    bounded: int
    """Valid layouts whose bound was computed."""
    predicted: int
    """Layouts whose memory was predicted and, where it fits, time."""
    bound_s: float
    """Seconds of one core that the bounds took."""
    exact: bool
    """Whether no layout with only a bound could be among the best; otherwise the limit on predictions was reached."""
    whole: bool = True
    """Whether the search made all its predictions, and was not told to stop early."""


def search(
    model: Model,
    cluster: Cluster,
    sequence: int,
    batch: int,
    compute: str = "bf16",
    top: int = 10,
    allow: Collection[str] = (),
    enough: Callable[[], bool] = lambda: False,
) -> Search:
    """The fastest layouts for `batch` sequences a step that fit, and the nearest that do not.

    `allow` adds what is not tried by default: fp8, offload, zero-bubble. `enough` is called before every prediction
    once one layout fits; if it returns true, the search ends with what it has.
    """
    machine, allowed = machine_of(cluster), _allowed(allow)
    if sequence > model.max_sequence_length:
        raise UserError(
            f"--seq = {sequence} is longer than the model's max_sequence_length = {model.max_sequence_length} allows; "
            "give a shorter one"
        )
    begun = process_time()
    families = list(families_of(model, machine, sequence, batch, compute, allowed))
    layouts = bounded(model, machine, families, batch, allowed)
    bound_s = process_time() - begun
    if not len(layouts):
        raise UserError(
            f"--batch-tokens gives {batch} sequences a step, which no layout spreads evenly over {machine.gpus} GPUs; "
            f"give a multiple of {machine.gpus * sequence}"
        )

    def job_of(index: int) -> Job:
        return job_at(model, layouts, index, machine.gpus, sequence, batch)

    def candidate(job: Job) -> Candidate:
        return Candidate(job, predict(job, cluster, every_rank=False))

    room = SAFE * machine.memory_bytes
    order = np.argsort(layouts.time_s, kind="stable")
    order = order[layouts.memory_bytes[order] <= room]
    fitting: list[Candidate] = []
    over: list[tuple[float, int]] = []
    steps: list[float] = []
    looked, exact, whole = 0, True, True
    for index in map(int, order):
        if len(steps) >= top and layouts.time_s[index] >= steps[top - 1]:
            break
        if looked == _PREDICTED:
            exact = False
            break
        if steps and enough():
            exact = whole = False
            break
        job = job_of(index)
        looked += 1
        held, on_host = _held(job)  # memory first: a pipeline takes much longer to simulate
        if held > room and job.memory.recompute == "full":  # segments take longer: tried only where it does not fit
            job = _in_segments(job)
            held, on_host = _held(job)
        if held > room:
            over.append((held, index))
            continue
        if machine.host_bytes is not None and on_host > machine.host_bytes:
            continue
        fitting.append(candidate(job))
        insort(steps, fitting[-1].prediction.step_s)
    fitting.sort(key=lambda one: one.prediction.step_s)
    best = list(islice((one for one in fitting if _runs(one.job, machine.gpus)), top))
    fastest = best[0].prediction.step_s if best else float("inf")
    nearest = _nearest(layouts, room, fastest) if whole else []
    over += [(_held(job_of(index))[0], index) for index in nearest]
    may_be_faster = (job_of(index) for _, index in sorted(over) if whole and layouts.time_s[index] < fastest)
    misses = islice((one for one in map(candidate, may_be_faster) if one.prediction.step_s < fastest), _MISSES)
    return Search(tuple(best), tuple(misses), len(layouts), looked + len(nearest), bound_s, exact, whole)


def _held(job: Job) -> tuple[float, float]:
    """Most bytes of a rank on its device, and on its host."""
    ranks = memory_of(job, own_software(job), every_rank=False)
    return max(rank.device for rank in ranks), max(rank.host for rank in ranks)


def _in_segments(job: Job) -> Job:
    """A fully recomputed job with segments of as many blocks as take least memory; as it is if that is one.

    Segments of k blocks keep 1/k of the blocks' inputs and recompute k blocks at once: least near the square root of
    how many blocks' worth the inputs are.
    """
    kept, restored = block_bytes(job, own_software(job), "segment")
    inputs = min(job.accumulation, job.layout.pp) * job.model.layers / job.layout.pp * kept
    worth = inputs / (kept + restored)
    if worth <= 2:  # two blocks restored instead of one are more than the half of the inputs
        return job
    lengths = sorted({int(sqrt(worth)), int(sqrt(worth)) + 1} - {1})
    return min((_recomputing(job, Segments(segments=each)) for each in lengths), key=lambda way: _held(way)[0])


def _recomputing(job: Job, recompute: Segments) -> Job:
    return job.model_copy(update={"memory": job.memory.model_copy(update={"recompute": recompute})})


def _allowed(allow: Collection[str]) -> frozenset[str]:
    for word in allow:
        if word not in ALLOWED:
            raise UserError(f"--allow has {word!r}, which is not an option; give some of {', '.join(ALLOWED)}")
    return frozenset(allow)


def _nearest(layouts: Layouts, room: float, fastest: float) -> list[int]:
    """Of the layouts that cannot fit and may be faster, those that need least."""
    over = np.flatnonzero((layouts.memory_bytes > room) & (layouts.time_s < fastest))
    return [int(index) for index in over[np.argsort(layouts.memory_bytes[over], kind="stable")][:_MISSES]]


def _runs(job: Job, gpus: int) -> bool:
    """Whether the trainer accepts the layout."""
    try:
        require_layout(job, gpus)
    except UserError:
        return False
    return True


def what_would_fit(model: Model, cluster: Cluster, sequence: int, batch: int, compute: str = "bf16") -> str | None:
    """The smallest change that makes a model fit: the host's memory, or a multiple of the GPUs."""
    try:
        found = search(model, cluster, sequence, batch, compute, top=1, allow=("offload",))
    except UserError:
        return None
    if found.best:
        return "--allow offload, which keeps optimizer states in the host's memory"
    for times in (2, 4, 8, 16, 32, 64):
        within = min(8, cluster.gpus_per_node * times)
        larger = _resized(cluster, cluster.nodes * cluster.gpus_per_node * times // within, within)
        sequences = max(batch, within * larger.nodes)
        try:
            found = search(model, larger, sequence, sequences, compute, top=1)
        except UserError:
            continue
        if found.best:
            return f"--cluster {larger.nodes}x{within}x{cluster.gpu}, {times} times the GPUs"
    return None


def _resized(cluster: Cluster, nodes: int, gpus_per_node: int) -> Cluster:
    """The same machines in another number."""
    return cluster.model_copy(update={"nodes": nodes, "gpus_per_node": gpus_per_node})
