"""Every valid layout of a model on a machine, with the least time and memory each can take, as arrays over all of them.

A bound leaves out what can only add (exposed transfers once a step, uneven stages, updates, recomputation): a
layout whose bound is slower than another's prediction cannot be the faster one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from meshwright.cost import MASTER_BYTES, layer_parameters, state_bytes
from meshwright.hardware import is_known
from meshwright.job import Job, Model
from meshwright.plan.compute import block_work, head_work, products_of
from meshwright.plan.kernels import device_of, matmul_at_once
from meshwright.plan.machine import Machine
from meshwright.plan.memory import block_bytes, side_by_side
from meshwright.plan.software import CONTEXT_BYTES, MESHWRIGHT, MESHWRIGHT_COMPILED
from meshwright.plan.step import STRAGGLERS, groups_of, shared_s

MODES = ("none", "selective", "full")
ALLOWED = ("fp8", "offload", "zero-bubble")
"""What a search tries only on request: other arithmetic, the host's memory, schedules that cannot be
compiled."""
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4))
_ZERO_BUBBLE = (("zb-h1", 1), ("zb-v", 2))
_MOST_CONTEXT = 16
_LEAST_TOKENS = 2048
"""Fewest tokens of a sequence on a context-parallel rank."""
_MOST_MICRO_BATCH = 64


@dataclass(frozen=True)
class Family:
    """What is the same for all layouts with these degrees, this micro-batch and this arithmetic."""

    tp: int
    cp: int
    micro_batch: int
    compute: str
    compiled: bool
    forward_s: float
    """A block's, with its transfers."""
    backward_s: tuple[float, ...]
    """By mode."""
    head_s: float
    kept_bytes: tuple[float, ...]
    layer_elements: float
    table_elements: float


@dataclass(frozen=True)
class Layouts:
    """All layouts: parallel arrays with one entry per layout."""

    families: list[Family]
    schedules: tuple[tuple[str, int], ...]
    time_s: Any
    memory_bytes: Any
    family: Any
    pp: Any
    zero: Any
    mode: Any
    schedule: Any
    offload: Any

    def __len__(self) -> int:
        return len(self.time_s)


def families_of(
    model: Model, machine: Machine, sequence: int, batch: int, compute: str, allow: frozenset[str]
) -> Iterator[Family]:
    """Every degree of tensor and context parallelism and every micro-batch that divides the model."""
    if compute == "bf16" and is_known(machine.gpu) and "bf16" not in machine.gpu.peak:
        compute = "fp16"  # cards before Ampere: the default is for those that have it
    ways = [(compute, True)]
    ways += [("fp8", True)] if "fp8" in allow and compute != "fp8" and _takes_fp8(model) else []
    ways += [(way, False) for way, _ in ways] if "zero-bubble" in allow else []
    for way, compiled in ways:
        yield from _families(model, machine, sequence, batch, way, compiled)


def _takes_fp8(model: Model) -> bool:
    sides = (model.width, model.ffn_width, model.heads * model.head_dim, model.kv_heads * model.head_dim)
    return not any(side % 16 for side in sides)


def _families(
    model: Model, machine: Machine, sequence: int, batch: int, compute: str, compiled: bool
) -> Iterator[Family]:
    device = device_of(machine.gpu, machine.rates, compute, machine.measured)
    software = MESHWRIGHT_COMPILED if compiled else MESHWRIGHT
    jobs = list(_jobs(model, machine.gpus, sequence, batch, compute))
    for kind in ("forward", "input", "weight"):
        sizes = [size for job in jobs for size in products_of(job, software)]
        turned = {"forward": (0, 1, 2), "input": (0, 2, 1), "weight": (1, 2, 0)}[kind]
        matmul_at_once(device, kind, [(size[turned[0]], size[turned[1]], size[turned[2]]) for size in sizes])
    kept: dict[int, list[float]] = {}
    for job in jobs:
        tp, cp, micro = job.layout.tp, job.layout.cp, job.batch.micro_batch
        if tp not in kept:  # what a block keeps grows with the tokens of a rank, but for copies of weights
            alone = job.model_copy(update={"layout": job.layout.model_copy(update={"cp": 1})})
            copies = {"none": side_by_side(alone, software)}
            kept[tp] = [(block_bytes(alone, software, mode)[0] - copies.get(mode, 0.0)) / micro for mode in MODES]
        groups = groups_of(job, machine.wires.gpus_per_node)
        works = [block_work(job, device, software, mode) for mode in MODES]
        sent = [
            shared_s(job, device, software, machine.wires, groups, mode, work)
            for mode, work in zip(MODES, works, strict=True)
        ]
        head = head_work(job, device, software)
        yield Family(
            tp,
            cp,
            micro,
            compute,
            compiled,
            works[0].forward + sent[0][0],
            tuple(work.backward + backward for work, (_, backward) in zip(works, sent, strict=True)),
            head.forward + head.backward,
            tuple(micro / cp * size for size in kept[tp]),
            layer_parameters(job),
            model.vocab_size * model.width / tp,
        )


def _jobs(model: Model, gpus: int, sequence: int, batch: int, compute: str) -> Iterator[Job]:
    bare = Job()
    precision = bare.precision.model_copy(update={"compute": compute})
    for tp, cp in product(powers(gpus), powers(_MOST_CONTEXT)):
        divides = not any(size % tp for size in (model.heads, model.kv_heads, model.ffn_width))
        uneven = tp * cp > 1 and sequence % (2 * cp * tp)
        if not divides or tp * cp > gpus or uneven or (cp > 1 and sequence // cp < _LEAST_TOKENS):
            continue
        layout = bare.layout.model_copy(update={"tp": tp, "cp": cp})
        for micro in powers(min(_MOST_MICRO_BATCH, batch)):
            sizes = {"sequence_length": sequence, "global_batch": micro, "micro_batch": micro}
            sized = bare.batch.model_copy(update=sizes)
            yield bare.model_copy(update={"model": model, "batch": sized, "layout": layout, "precision": precision})


def bounded(model: Model, machine: Machine, families: list[Family], batch: int, allow: frozenset[str]) -> Layouts:
    """Least seconds and least bytes of every valid layout."""
    schedules = (*_SCHEDULES, *(_ZERO_BUBBLE if "zero-bubble" in allow else ()))
    pps = np.array([pp for pp in powers(machine.gpus) if pp <= model.layers])
    offloads = 2 if "offload" in allow else 1
    sizes = (len(families), len(pps), 4, len(MODES), len(schedules), offloads)
    grid = np.meshgrid(*map(np.arange, sizes), indexing="ij", copy=False)
    family, place, zero, mode, schedule, offload = (axis.ravel() for axis in grid)

    def of(name: str) -> Any:
        return np.array([getattr(one, name) for one in families], dtype=float)

    pp = pps[place]
    virtual = np.array([v for _, v in schedules])[schedule]
    splits = np.array([name.startswith("zb") for name, _ in schedules])[schedule]
    tp, cp, micro = of("tp")[family], of("cp")[family], of("micro_batch")[family]
    dp = machine.gpus / (tp * cp * pp)
    accumulation = batch / (micro * dp)
    sharers = dp * cp
    valid = (dp >= 1) & (dp % 1 == 0) & (accumulation >= 1) & (accumulation % 1 == 0)
    valid &= np.where(pp == 1, schedule == 0, pp * virtual <= model.layers)
    valid &= (virtual == 1) | splits | (accumulation % pp == 0)
    valid &= np.where(sharers == 1, zero == 0, True) & ~((zero == 0) & (cp > 1))
    valid &= ~((zero == 2) & (pp > 1))  # where gradients stay whole until the step's end, it is zero 1
    # Halves of a backward are not compiled, keep nothing selectively, and need their parameters in between.
    valid &= np.where(of("compiled")[family] == 1, ~splits, splits & (zero < 3) & (mode != MODES.index("selective")))
    keep = np.flatnonzero(valid)
    family, zero, mode, schedule, offload = family[keep], zero[keep], mode[keep], schedule[keep], offload[keep]
    pp, virtual, splits = pp[keep], virtual[keep], splits[keep]
    accumulation, sharers = accumulation[keep], sharers[keep]

    backward = np.array([one.backward_s for one in families])[family, mode]
    kept = np.array([one.kept_bytes for one in families])[family, mode]
    stage_layers = model.layers / pp
    block_s = of("forward_s")[family] + backward
    rank_s = stage_layers * block_s + of("head_s")[family] / pp
    elements = (
        stage_layers * of("layer_elements")[family] + of("table_elements")[family] * (1 if model.tied else 2) / pp
    )
    time = accumulation * rank_s + np.where(splits | (virtual > 1), 0.0, (pp - 1) * rank_s)
    # With several stages a rank, the last rank, which may have a block less than others, waits for one stage of each.
    waits = (pp - 1) * np.floor(stage_layers / virtual) * block_s
    time = np.where(~splits & (virtual > 1), np.maximum(time, accumulation * (rank_s - block_s) + waits), time)
    ring = _fastest_ring(machine)
    gathered = np.where(zero == 3, 8.0 * elements * accumulation, 0.0) * (sharers - 1) / sharers / ring
    time = np.maximum(time, gathered) * (1 + STRAGGLERS * np.log2(machine.nodes))

    shared = np.where(zero > 0, sharers, 1.0)
    whole = (zero == 1) & (accumulation > 1) | (zero > 0) & (zero < 3) & (pp > 1)
    kept_per_entry = MASTER_BYTES + state_bytes(Job(), 1.0, 0.0)  # the optimizer of the resulting jobs
    states = elements * kept_per_entry / shared + np.where(accumulation > 1, 4.0 * elements / shared, 0.0)
    states += np.where(whole, 4.0 * elements, 0.0)
    states = np.where(offload == 1, 0.0, states) + np.where(zero < 3, 2.0 * elements, 0.0)
    flying = np.minimum(accumulation, np.where(splits & (virtual > 1), 1.0, pp))
    activations = flying * stage_layers * kept
    # Full recomputation stands for segments of k blocks too, which keep 1/k of that and recompute k blocks at once: at
    # best as much of either. Only where it is more than two blocks' can that be less.
    whole = np.array([one.kept_bytes for one in families])[family, MODES.index("none")]
    segments = (mode == MODES.index("full")) & (activations > 2 * whole)
    memory = states + np.where(segments, np.sqrt(activations * whole), activations) + CONTEXT_BYTES
    return Layouts(families, schedules, time, memory, family, pp, zero, mode, schedule, offload)


def _fastest_ring(machine: Machine) -> float:
    """The most that any group's ring may carry."""
    wires = machine.wires
    return max(wires.node_bytes_per_s, wires.network_bytes_per_s * wires.gpus_per_node)


def powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def job_at(model: Model, layouts: Layouts, index: int, gpus: int, sequence: int, batch: int) -> Job:
    """One of the layouts as a job."""
    family, pp, zero = layouts.families[layouts.family[index]], int(layouts.pp[index]), int(layouts.zero[index])
    schedule, virtual = layouts.schedules[layouts.schedule[index]]
    data = gpus // (family.tp * family.cp * pp)
    layout: dict[str, Any] = {"tp": family.tp, "cp": family.cp, "pp": pp, "zero": zero}
    layout["dp_shard" if zero else "dp_replicate"] = data
    if pp > 1:
        layout |= {"schedule": schedule} | ({"virtual_stages": virtual} if schedule == "interleaved" else {})
    memory: dict[str, Any] = {"recompute": MODES[layouts.mode[index]]}
    return Job.model_validate(
        {
            "model": model.model_dump(exclude_unset=True),
            "batch": {"sequence_length": sequence, "global_batch": batch, "micro_batch": family.micro_batch},
            "layout": layout,
            "memory": memory | ({"offload": ["optimizer"]} if layouts.offload[index] else {}),
            "precision": {"compute": family.compute},
            "run": {"compile": family.compiled},
        }
    )
