"""Every valid layout of a model on a machine: a bound on time and memory for all at once, a prediction for the best.

The bound leaves out what can only add (exposed transfers once a step, uneven stages, waiting), so that a layout whose
bound is slower than another's prediction cannot be the faster one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from time import perf_counter
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.job.model import Model
from meshwright.plan.compute import block_work, head_work
from meshwright.plan.kernels import device_of
from meshwright.plan.machine import Machine, machine_of
from meshwright.plan.memory import CONTEXT_BYTES, block_bytes
from meshwright.plan.parameters import layer_parameters
from meshwright.plan.predict import Prediction, predict
from meshwright.plan.software import MESHWRIGHT_COMPILED, Software

MODES = ("none", "selective", "full")
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4))
SAFE = 0.95
"""Of a GPU's memory, what a layout may be predicted to use: predictions err, and drivers keep some of what is sold."""
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
    """Layouts that would be faster than the best and do not fit, fastest first."""
    bounded: int
    """Valid layouts whose bound was computed."""
    predicted: int
    bound_s: float
    """Seconds the bounds took."""
    whole: bool = True
    """Whether every prediction was made that a search makes: not where it was asked to end before."""


@dataclass(frozen=True)
class _Piece:
    """What is the same for all layouts with these degrees and this micro-batch."""

    tp: int
    cp: int
    micro_batch: int
    forward_s: float
    """A block's."""
    backward_s: tuple[float, ...]
    """By mode."""
    head_s: float
    kept_bytes: tuple[float, ...]
    layer_elements: float
    table_elements: float


def search(
    model: Model,
    cluster: Cluster,
    sequence: int,
    batch: int,
    compute: str = "bf16",
    top: int = 10,
    enough: Callable[[], bool] = lambda: False,
) -> Search:
    """The fastest layouts for `batch` sequences a step that fit, and the nearest that do not.

    `enough` is asked before every prediction once one layout fits; where it says so, those so far are what was found.
    """
    machine, software = machine_of(cluster), MESHWRIGHT_COMPILED
    if sequence > model.max_sequence_length:
        raise UserError(
            f"--seq = {sequence} is longer than the model's max_sequence_length = {model.max_sequence_length} allows; "
            "give a shorter one"
        )
    import meshwright.parallel  # noqa: F401  torch is loaded before the clock starts

    begun = perf_counter()
    pieces = list(_pieces(model, machine, software, sequence, batch, compute))
    layouts = _bound(model, machine, pieces, batch)
    bound_s = perf_counter() - begun
    if not len(layouts["time"]):
        raise UserError(
            f"--batch-tokens makes {batch} sequences a step, which no layout spreads evenly over {machine.gpus} GPUs; "
            f"give a multiple of {machine.gpus * sequence}"
        )

    def candidate(index: int) -> Candidate:
        job = _job(model, pieces, layouts, index, machine.gpus, sequence, batch, compute)
        return Candidate(job, predict(job, cluster, every_rank=False))

    room = SAFE * machine.gpu.memory_gib * 2**30

    def fits(one: Candidate) -> bool:
        return one.prediction.fullest.device <= room

    order = np.argsort(layouts["time"], kind="stable")
    order = order[layouts["memory"][order] <= room][:_PREDICTED]
    tried: list[Candidate] = []
    found = False
    for index in order:
        if found and enough():
            break
        tried.append(candidate(index))
        found = found or fits(tried[-1])
    whole = len(tried) == len(order)
    fitting = sorted((one for one in tried if fits(one)), key=lambda one: one.prediction.step_s)
    best = list(islice((one for one in fitting if _runs(one.job, machine.gpus)), top))
    fastest = best[0].prediction.step_s if best else float("inf")
    over = np.flatnonzero((layouts["memory"] > room) & (layouts["time"] < fastest))
    nearest = over[np.argsort(layouts["memory"][over], kind="stable")][: _MISSES if whole else 0]
    tried += [candidate(index) for index in nearest]
    misses = [one for one in tried if not fits(one) and one.prediction.step_s < fastest]
    misses.sort(key=lambda one: one.prediction.fullest.device)
    return Search(tuple(best), tuple(misses[:_MISSES]), len(layouts["time"]), len(tried), bound_s, whole)


def _runs(job: Job, gpus: int) -> bool:
    """Whether the trainer takes the layout."""
    from meshwright.parallel import require_layout

    try:
        require_layout(job, gpus)
    except UserError:
        return False
    return True


def _pieces(
    model: Model, machine: Machine, software: Software, sequence: int, batch: int, compute: str
) -> Iterator[_Piece]:
    device = device_of(machine.gpu, machine.rates, compute, machine.measured)
    for tp, cp in product(_powers(machine.gpus), _powers(16)):
        divides = not any(size % tp for size in (model.heads, model.kv_heads, model.ffn_width, model.width))
        if not divides or tp * cp > machine.gpus:
            continue
        if sequence % (2 * cp * tp) or (cp > 1 and sequence // cp < 2048):
            continue
        bare, kept = Job(), None
        for micro in _powers(min(64, batch)):
            sizes = {"sequence_length": sequence, "global_batch": micro, "micro_batch": micro}
            job = Job.model_construct(
                model=model,
                batch=bare.batch.model_copy(update=sizes),
                layout=bare.layout.model_copy(update={"tp": tp, "cp": cp}),
                precision=bare.precision.model_copy(update={"compute": compute}),
            )
            if kept is None:  # what a block keeps grows with the micro-batch and nothing else
                kept = [block_bytes(job, software, mode)[0] for mode in MODES]
            works = [block_work(job, device, software, mode) for mode in MODES]
            head = head_work(job, device, software)
            yield _Piece(
                tp,
                cp,
                micro,
                works[0].forward,
                tuple(work.backward for work in works),
                head.forward + head.backward,
                tuple(micro * size for size in kept),
                layer_parameters(job),
                model.vocab_size * model.width / tp,
            )


def _bound(model: Model, machine: Machine, pieces: list[_Piece], batch: int) -> dict[str, Any]:
    """Least seconds and least bytes of every valid layout, as arrays over all of them."""
    pps = np.array([pp for pp in _powers(machine.gpus) if pp <= model.layers])
    sizes = (len(pieces), len(pps), 4, len(MODES), len(SCHEDULES))
    grid = np.meshgrid(*map(np.arange, sizes), indexing="ij")
    piece, place, zero, mode, schedule = (axis.ravel() for axis in grid)

    def of(name: str) -> Any:
        return np.array([getattr(one, name) for one in pieces], dtype=float)

    pp = pps[place]
    virtual = np.array([v for _, v in SCHEDULES])[schedule]
    tp, cp, micro = of("tp")[piece], of("cp")[piece], of("micro_batch")[piece]
    dp = machine.gpus / (tp * cp * pp)
    accumulation = batch / (micro * dp)
    sharers = dp * cp
    valid = (dp >= 1) & (dp % 1 == 0) & (accumulation >= 1) & (accumulation % 1 == 0)
    valid &= np.where(pp == 1, schedule == 0, pp * virtual <= model.layers)
    valid &= (virtual == 1) | (accumulation % pp == 0)
    valid &= np.where(sharers == 1, zero == 0, True) & ~((zero == 0) & (cp > 1))
    valid &= ~((zero == 2) & (pp > 1))  # where gradients stay whole until the step's end, it is zero 1
    keep = np.flatnonzero(valid)
    piece, zero, mode, schedule = piece[keep], zero[keep], mode[keep], schedule[keep]
    pp, virtual, accumulation, sharers = pp[keep], virtual[keep], accumulation[keep], sharers[keep]

    backward = np.array([one.backward_s for one in pieces])[piece, mode]
    kept = np.array([one.kept_bytes for one in pieces])[piece, mode]
    stage_layers = model.layers / pp
    rank_s = stage_layers * (of("forward_s")[piece] + backward) + of("head_s")[piece] / pp
    elements = stage_layers * of("layer_elements")[piece] + of("table_elements")[piece] * (1 if model.tied else 2) / pp
    compute_s = accumulation * rank_s
    time = compute_s + (pp - 1) * rank_s / virtual
    ring = _fastest_ring(machine)
    gathered = np.where(zero == 3, 8.0 * elements * accumulation, 0.0) * (sharers - 1) / sharers / ring
    time = np.maximum(time, gathered)

    shared = np.where(zero > 0, sharers, 1.0)
    whole = (zero == 1) & (accumulation > 1) | (zero > 0) & (zero < 3) & (pp > 1)
    states = elements * (4 + 8) / shared + np.where(zero < 3, 2.0 * elements, 0.0)
    states += np.where(accumulation > 1, 4.0 * elements / shared, 0.0) + np.where(whole, 4.0 * elements, 0.0)
    memory = states + np.minimum(accumulation, pp) * stage_layers * kept + CONTEXT_BYTES
    return {"time": time, "memory": memory, "piece": piece, "pp": pp, "zero": zero, "mode": mode, "schedule": schedule}


def _fastest_ring(machine: Machine) -> float:
    """The most that any group's ring may carry."""
    wires = machine.wires
    return max(wires.node_bytes_per_s, wires.network_bytes_per_s * wires.gpus_per_node)


def _job(
    model: Model,
    pieces: list[_Piece],
    layouts: dict[str, Any],
    index: int,
    gpus: int,
    sequence: int,
    batch: int,
    compute: str,
) -> Job:
    piece, pp, zero = pieces[layouts["piece"][index]], int(layouts["pp"][index]), int(layouts["zero"][index])
    schedule, virtual = SCHEDULES[layouts["schedule"][index]]
    data = gpus // (piece.tp * piece.cp * pp)
    layout: dict[str, Any] = {"tp": piece.tp, "cp": piece.cp, "pp": pp, "zero": zero}
    layout["dp_shard" if zero else "dp_replicate"] = data
    if pp > 1:
        layout |= {"schedule": schedule} | ({"virtual_stages": virtual} if virtual > 1 else {})
    return Job.model_validate(
        {
            "model": model.model_dump(exclude_unset=True),
            "batch": {"sequence_length": sequence, "global_batch": batch, "micro_batch": piece.micro_batch},
            "layout": layout,
            "memory": {"recompute": MODES[layouts["mode"][index]]},
            "precision": {"compute": compute},
            "run": {"compile": True},
        }
    )


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
