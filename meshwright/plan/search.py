"""The fastest layouts of a job on a machine: a bound for all of them, a prediction for those that may be the best."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from math import sqrt
from time import process_time
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Budget, Cluster, Segments
from meshwright.layout import require_router
from meshwright.plan.bound import Layouts, bounded
from meshwright.plan.budgets import within
from meshwright.plan.kept import block_bytes
from meshwright.plan.machine import Machine, machine_of
from meshwright.plan.memory import RankMemory
from meshwright.plan.predict import Prediction, memory_of, own_software, predict
from meshwright.plan.space import ALLOWED
from meshwright.plan.target import why_refused

SAFE = 0.95
"""Fraction of a GPU's memory a layout may be predicted to use: predictions err, and drivers reserve some of it."""
_EFFORT = 1000
"""The limit of a search, and of its budgets again, in predictions without a pipeline: about two seconds."""
_ACTIONS = 400
"""Actions of a schedule that take as long to simulate as one prediction without a pipeline."""
_BLOCKS = 5
"""Blocks whose budget takes as long to find."""
_MISSES = 3
Held = tuple[RankMemory, ...]
"""What ranks hold, by pipeline rank."""
_SMALLEST = 50
_BUDGETS = 6
"""Pipelines that do not fit for which a budget is looked for: every one takes as long as dozens of predictions."""


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


def order_of(job: Job, step_s: float) -> tuple[float, bool]:
    """Faster first; of equal ones, but for rounding, one that recomputes nothing."""
    return float(f"{step_s:.9g}"), job.memory.recompute != "none"


def search(
    job: Job,
    cluster: Cluster | Machine,
    top: int = 10,
    allow: Collection[str] = (),
    enough: Callable[[], bool] = lambda: False,
    *,
    at_most_bytes: float | None = None,
    at_once: bool = False,
    give_up: Callable[[], bool] = lambda: False,
) -> Search:
    """The fastest layouts of a job that fit, and the nearest that do not: its layout, recomputation, offload and
    micro-batch are chosen, all else is the job's own.

    `allow` adds what is not tried by default: fp8, offload, zero-bubble; what the job itself has is always tried.
    `enough` is called before every prediction once one layout fits, `give_up` before that; if it returns true, the
    search ends with what it has. `at_most_bytes` leaves a layout less than the device has. With `at_once`
    every rank computes one micro-batch per step, so that nothing is accumulated.
    """
    require_router(job)
    machine = cluster if isinstance(cluster, Machine) else machine_of(cluster)
    allowed = _allowed(allow) | _own(job)
    room = min(SAFE * machine.memory_bytes, at_most_bytes or float("inf"))
    sequence, most = job.batch.sequence_length, job.model.max_sequence_length
    if sequence > most:
        raise UserError(
            f"--seq = {sequence} is longer than the model's max_sequence_length = {most} allows; give a shorter one, "
            f"or set model.max_sequence_length = {sequence}"
        )
    begun = process_time()
    layouts = bounded(job, machine, allowed, room, at_once=at_once)
    bound_s = process_time() - begun
    if not len(layouts):
        raise UserError(
            f"--batch-tokens gives {job.batch.global_batch} sequences a step, which no layout spreads evenly over "
            f"{machine.gpus} GPUs; give a multiple of {machine.gpus * sequence}, or batch.global_batch a multiple of "
            f"{machine.gpus}"
        )

    def candidate(job: Job, held: Held | None = None) -> Candidate:
        return Candidate(job, predict(job, machine, every_rank=False, held=None if machine.on_cpu else held))

    order = np.argsort(layouts.time_s, kind="stable")
    order = order[layouts.memory_bytes[order] <= room]
    found = _Best(top, machine)
    over: list[tuple[float, int]] = []
    looked, exact, whole = 0, True, True
    # Budgets last: they take longest, and by then most of them are known to be slower than what was found.
    budgeted = np.array([layouts.is_budget(index) for index in order], dtype=bool)
    for turn in (order[~budgeted], order[budgeted]):
        effort = 0
        for index in map(int, turn):
            if not whole or layouts.time_s[index] >= found.slowest_s:
                break
            if effort > _EFFORT:
                exact = False
                break
            if enough() if found.best else give_up():
                exact = whole = False
                break
            looked += 1
            made, held = _fitted(layouts, index, room)
            effort += 1 + _to_find(made)
            if _device(held) > room:
                over.append((_device(held), index))
            else:
                effort += _to_simulate(made)
                found.offer(made, held, candidate)
    budgets = _to_budget(layouts, [index for _, index in over]) if whole else []
    for job_over in budgets:
        if (smaller := within(job_over, room, device_bytes_of)) is not None:
            found.offer(smaller, held_of(smaller), candidate)
    best = found.best
    fastest = best[0].prediction.step_s if best else float("inf")
    nearest = _nearest(layouts, room, fastest) if whole else []
    over += [(device_bytes_of(layouts.job_at(index)), index) for index in nearest]
    may_be_faster = [layouts.job_at(index) for _, index in sorted(over) if whole and layouts.time_s[index] < fastest]
    kinds = {_kind(made): made for made in reversed(may_be_faster)}  # of each kind the smallest
    smallest = (made for made in may_be_faster if kinds[_kind(made)] is made)
    misses = islice((one for one in map(candidate, smallest) if one.prediction.step_s < fastest), _MISSES)
    looked += len(nearest) + len(budgets)
    return Search(tuple(best), tuple(misses), len(layouts), looked, bound_s, exact, whole)


def _to_find(job: Job) -> int:
    """How long a layout's budget took to find, in predictions without a pipeline."""
    return job.model.layers // _BLOCKS if isinstance(job.memory.recompute, Budget) else 0


def _to_simulate(job: Job) -> int:
    """How much longer a layout takes to predict for its pipeline, in predictions without one."""
    layout = job.layout
    stages = layout.pp * (layout.virtual_stages or 1)
    return 0 if layout.pp == 1 else 2 * stages * min(job.accumulation, 4 * layout.pp) // _ACTIONS


def _to_budget(layouts: Layouts, over: list[int]) -> list[Job]:
    """Pipelines that do not fit, without recomputation, the fastest first and one of a kind; none with extra tokens,
    which a budget does not count."""
    if layouts.job.model.extra_tokens:
        return []
    jobs = (recomputing(layouts.job_at(index), "none") for index in over)
    kinds: dict[tuple[Any, ...], Job] = {}
    for job in jobs:
        if job.layout.pp > 1 and not job.layout.schedule.startswith("zb"):
            kinds.setdefault(_kind(job), job)
    return list(kinds.values())[:_BUDGETS]


class _Best:
    """The fastest layouts so far: of those that differ only in where shards and stages end, the fastest alone."""

    def __init__(self, top: int, machine: Machine) -> None:
        self._top, self._machine = top, machine
        self._by_kind: dict[tuple[Any, ...], Candidate] = {}
        self.best: list[Candidate] = []
        """Fastest first."""

    @property
    def slowest_s(self) -> float:
        """What another layout must take less than to be among them."""
        best = self.best
        return best[-1].prediction.step_s if len(best) == self._top else float("inf")

    def offer(self, job: Job, held: Held, candidate: Callable[[Job, Held], Candidate]) -> None:
        """Predict a layout that fits its devices, and keep it if its host has room, it runs and it is fast enough."""
        if self._machine.host_bytes is not None and _host(held) > self._machine.host_bytes:
            return
        one = candidate(job, held)
        kind = _kind(job)
        before = self._by_kind.get(kind)
        slowest = self.slowest_s if before is None else before.prediction.step_s
        if one.prediction.step_s < slowest and _runs(job, self._machine.gpus):
            self._by_kind[kind] = one
            found = self._by_kind.values()
            self.best = sorted(found, key=lambda one: order_of(one.job, one.prediction.step_s))[: self._top]


def _kind(job: Job) -> tuple[Any, ...]:
    """A layout without what it is not chosen by: how many replicas share states, and which stage has a layer more."""
    layout, recompute = job.layout, job.memory.recompute
    degrees = (layout.tp, layout.cp, layout.ep, layout.pp, layout.schedule, layout.virtual_stages, layout.zero)
    way = (job.precision.format, job.run.compiles, job.memory.offload)
    return *degrees, job.batch.micro_batch, recompute if isinstance(recompute, str) else type(recompute), *way


def _fitted(layouts: Layouts, index: int, room: float) -> tuple[Job, Held]:
    """A layout with as much recomputation as its mode needs to fit, and what its ranks hold."""
    job = layouts.job_at(index)
    held = held_of(job)
    over = _device(held) > room
    if over and layouts.is_budget(index):
        if device_bytes_of(recomputing(job, "full")) > room:  # no budget is below that
            return job, held
        job = within(job, room, device_bytes_of) or job
    elif over and job.memory.recompute == "full":  # segments take longer: tried only where it does not fit
        job = _in_segments(job)
    else:
        return job, held
    return job, held_of(job)


def _own(job: Job) -> frozenset[str]:
    """What a job has already, and so allows."""
    words = {"offload": bool(job.memory.offload), "zero-bubble": job.layout.schedule.startswith("zb")}
    return frozenset(word for word, given in words.items() if given)


def held_of(job: Job) -> Held:
    """What the pipeline ranks that may be fullest hold."""
    return memory_of(job, own_software(job), every_rank=False)


def device_bytes_of(job: Job) -> float:
    """Most bytes of a rank on its device."""
    return _device(held_of(job))


def _device(held: Held) -> float:
    return max(rank.device for rank in held)


def _host(held: Held) -> float:
    return max(rank.host for rank in held)


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
    return min((recomputing(job, Segments(segments=each)) for each in lengths), key=device_bytes_of)


def recomputing(job: Job, recompute: Segments | str) -> Job:
    """The job with other recomputation."""
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
    return why_refused(job, gpus) is None


def anything_fits(job: Job, cluster: Cluster, allow: Collection[str], *, at_once: bool = False) -> bool:
    """Whether one of the layouts that need least fits: sooner known than which is the fastest, and nearly always true
    if a search finds one."""
    machine = machine_of(cluster)
    room = SAFE * machine.memory_bytes
    layouts = bounded(job, machine, _allowed(allow) | _own(job), room, at_once=at_once)
    fewest = [
        index for index in map(int, np.argsort(layouts.memory_bytes, kind="stable")) if not layouts.is_budget(index)
    ]
    for index in fewest[:_SMALLEST]:
        if layouts.memory_bytes[index] > room:
            return False
        made, held = _fitted(layouts, index, room)
        roomy = machine.host_bytes is None or _host(held) <= machine.host_bytes
        if _device(held) <= room and roomy and _runs(made, machine.gpus):
            return True
    return False
