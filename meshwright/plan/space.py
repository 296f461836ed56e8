"""Which layouts a search tries: degrees, pipelines, sharding and recomputation, and each of them as a job."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, log2
from typing import Any, Literal

from meshwright.hardware import Gpu
from meshwright.job import Job
from meshwright.job.devices import Layout, Memory
from meshwright.job.training import Batch
from meshwright.layout.stages import balanced_counts

ALLOWED = ("fp8", "offload", "zero-bubble")
"""What a search tries only on request: other arithmetic, the host's memory, schedules that cannot be compiled."""
MODES = ("none", "selective", "full", "budget")
"""Recomputation; full includes segments of several blocks, budget any mixture of the other three."""
BUDGET = MODES.index("budget")
KINDS: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
"""Recomputation of one block."""
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4))
_ZERO_BUBBLE = (("zb-h1", 1), ("zb-v", 2))
_MOST_CONTEXT = 16
_LEAST_TOKENS = 2048
"""Fewest tokens of a sequence on a context-parallel rank."""
_MOST_STAGES = 128
"""No published training has a pipeline of more stages, and simulating one takes seconds."""
_MOST_HYBRIDS = 24
"""Numbers of GPUs with more divisors than this have millions of layouts otherwise."""
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SEARCHED = ("dp_replicate", "dp_shard", "zero", "tp", "cp", "ep", "pp", "schedule", "virtual_stages", "split")


@dataclass(frozen=True)
class Pipe:
    """A pipeline: its schedule, and the layers of each of its stages."""

    pp: int
    schedule: str
    virtual: int
    counts: tuple[int, ...]
    """Layers per stage."""
    given: bool
    """Whether the job has to name them in layout.split: they are not the balanced ones."""

    @property
    def splits_backward(self) -> bool:
        """Whether the backward runs as two halves."""
        return self.schedule.startswith("zb")

    @property
    def ranks(self) -> list[int]:
        """Layers per rank."""
        if self.schedule == "zb-v":
            return [self.counts[rank] + self.counts[-1 - rank] for rank in range(self.pp)]
        return [sum(self.counts[rank :: self.pp]) for rank in range(self.pp)]


def pipes_of(job: Job, gpus: int, allow: frozenset[str]) -> list[Pipe]:
    """Every pipeline over a divisor of the GPUs: balanced by cost, and with its last stage lighter or heavier."""
    halves = "zero-bubble" in allow and job.model.extra_tokens <= 1  # with more, torch gets them wrong
    schedules = (*_SCHEDULES, *(_ZERO_BUBBLE if halves else ()))
    pipes = [Pipe(1, "1f1b", 1, (job.model.layers,), given=False)]
    for pp in divisors(gpus)[1:]:
        for schedule, virtual in schedules:
            if pp * virtual <= min(job.model.layers, _MOST_STAGES):
                balanced = balanced_counts(job.model, job.batch.sequence_length, pp * virtual)
                pipes += [Pipe(pp, schedule, virtual, counts, counts != balanced) for counts in _splits(balanced)]
    return pipes


def _splits(balanced: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The stages as balanced, and with one layer less or more in the last of them, which has the head."""
    layers, others = sum(balanced), len(balanced) - 1
    ways = [balanced]
    for last in (balanced[-1] - 1, balanced[-1] + 1):
        each, more = divmod(layers - last, others)
        if last >= 1 and each >= 1:
            ways.append((*[each] * (others - more), *[each + 1] * more, last))
    return list(dict.fromkeys(ways))


def shardings_of(gpus: int) -> list[tuple[int, int]]:
    """Every zero stage with every dp_shard; what is left of the data-parallel ranks are replicas."""
    return [(0, 1), *product((1, 2, 3), divisors(gpus))]


def hybrid_sizes(gpus: int, gpus_per_node: int) -> set[int]:
    """Sizes of the groups that share states where there are replicas of them: every divisor, or of numbers with many
    of those the powers of two of a GPU and of a node."""
    sizes = divisors(gpus)
    if len(sizes) <= _MOST_HYBRIDS:
        return set(sizes)
    return {size for size in sizes if _is_power_of_two(size) or _is_power_of_two(size / gpus_per_node)}


def _is_power_of_two(number: float) -> bool:
    return number >= 1 and log2(number).is_integer()


def degrees_of(job: Job, gpus: int) -> Iterator[tuple[int, int, int]]:
    """Tensor, context and expert parallelism that divide the model and the sequence."""
    model, sequence = job.model, job.batch.sequence_length
    shared = gcd(model.heads, model.heads if job.layout.kv_replicate else model.kv_heads)
    if model.experts is None or model.experts.first_dense:
        shared = gcd(shared, model.ffn_width)
    if model.experts is not None:
        shared = gcd(shared, model.experts.shared_width)
    spread = [1] if model.experts is None else divisors(gcd(model.experts.count, gpus))
    for tp, cp in product(divisors(gcd(shared, gpus)), divisors(gpus)):
        uneven = tp * cp > 1 and sequence % (2 * cp * tp)
        if not (cp > _MOST_CONTEXT or gpus % (tp * cp) or uneven or (cp > 1 and sequence // cp < _LEAST_TOKENS)):
            yield from ((tp, cp, ep) for ep in spread)


def micro_batches_of(batch: int, at_once_on: int | None = None) -> list[int]:
    """Sequences per micro-batch that divide the batch; or of any size, with which one on each of some of so many ranks
    is all of it."""
    if at_once_on is not None:
        return sorted(batch // ranks for ranks in divisors(at_once_on) if batch % ranks == 0)
    return [size for size in _MICRO_BATCHES if batch % size == 0]


def ways_of(job: Job, gpu: Gpu, allow: frozenset[str]) -> list[tuple[str, bool]]:
    """Formats of compute that the GPU has, and whether blocks are compiled."""
    ways: list[tuple[str, bool]] = [(job.precision.format, job.run.compiles)]
    if "fp8" in allow and job.precision.format != "fp8" and "fp8" in gpu.peak and _takes_fp8(job):
        ways.append(("fp8", job.run.compiles))
    if "zero-bubble" in allow and job.run.compiles:
        ways += [(way, False) for way, _ in ways]
    return ways


def _takes_fp8(job: Job) -> bool:
    model = job.model
    sides = (model.width, model.ffn_width, model.heads * model.head_dim, model.kv_heads * model.head_dim)
    return not any(side % 16 for side in sides)


def with_way(job: Job, compute: str, compiled: bool) -> Job:
    """The job in another format, or not compiled; itself if it is so already."""
    if (compute, compiled) == (job.precision.format, job.run.compiles):
        return job
    precision = job.precision.model_copy(update={"compute": compute})
    changed: dict[str, Any] = {"precision": precision, "run": job.run.model_copy(update={"compile": compiled})}
    if not compiled or compute == "fp8":
        changed["layout"] = job.layout.model_copy(update={"async_tp": False})
    return job.model_copy(update=changed)


def with_degrees(job: Job, tp: int, cp: int, ep: int, micro_batch: int) -> Job:
    """The job on one tensor- and context-parallel group, with one micro-batch a step."""
    length = job.batch.sequence_length
    batch = Batch.model_construct(sequence_length=length, global_batch=micro_batch, micro_batch=micro_batch)
    return job.model_copy(
        update={"batch": batch, "layout": layout_with(job.layout, {"tp": tp, "cp": cp} | _spread(ep))}
    )


def _spread(ep: int) -> dict[str, int]:
    return {"ep": ep} if ep > 1 else {}


def with_layout(
    job: Job,
    pipe: Pipe,
    degrees: Layout,
    micro_batch: int,
    zero: int,
    shard: int,
    replicate: int,
    mode: int,
) -> Job:
    """The job in one of the layouts, with its own batch; a budget is for the search to choose."""
    chosen: dict[str, Any] = {"tp": degrees.tp, "cp": degrees.cp, "pp": pipe.pp, "zero": zero} | _spread(degrees.ep)
    chosen |= {"dp_shard": shard} if zero else {}
    chosen |= {"dp_replicate": replicate} if replicate > 1 or not zero else {}
    if pipe.pp > 1:
        chosen["schedule"] = pipe.schedule
        chosen |= {"virtual_stages": pipe.virtual} if pipe.schedule == "interleaved" else {}
        chosen |= {"split": pipe.counts} if pipe.given else {}
    layout = layout_with(job.layout, chosen)
    batch = job.batch.model_copy(update={"micro_batch": micro_batch})
    memory = Memory.model_construct(recompute="none" if mode == BUDGET else KINDS[mode])
    return job.model_copy(update={"layout": layout, "batch": batch, "memory": memory})


def layout_with(own: Layout, chosen: dict[str, Any]) -> Layout:
    """A layout's own settings, as its order and its prefetch, with what a search chooses."""
    dropped = set(_SEARCHED)
    if chosen.get("dp_replicate", 1) == 1:  # there is nothing to compress between
        dropped |= {name for name in Layout.model_fields if name.startswith("compress")}
    if chosen.get("tp", 1) == 1:
        dropped.add("async_tp")
    kept = {name: getattr(own, name) for name in own.model_fields_set - dropped}
    return Layout.model_construct(**(kept | chosen))


def divisors(number: int) -> list[int]:
    """Every divisor, from one."""
    return [each for each in range(1, number + 1) if number % each == 0]
