"""One job on one machine: its step and its memory, as named terms."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.cost import MASTER_BYTES, flops_per_token
from meshwright.errors import UserError
from meshwright.hardware import is_known, mfu_peak_flops
from meshwright.job import Job
from meshwright.job.devices import Cluster, Every, Segments
from meshwright.layout import (
    gathers_fp8,
    recompute_modes,
    require_budget_counts,
    require_experts,
    split_layers,
    table_of,
)
from meshwright.pipeline import Simulation, Table, build_table, simulate
from meshwright.plan.compute import products_of
from meshwright.plan.experts import expert_guess
from meshwright.plan.groups import groups_of, stage_ranges
from meshwright.plan.machine import Machine, machine_of
from meshwright.plan.measured import Measured
from meshwright.plan.memory import RankMemory, rank_memory
from meshwright.plan.software import MESHWRIGHT, MESHWRIGHT_COMPILED, Software
from meshwright.plan.step import Phases, TimedCompute, charged_bytes, stage_times, step_phases, table_for
from meshwright.plan.unmodelled import not_modelled


@dataclass(frozen=True)
class Prediction:
    """What a step takes and what every pipeline rank holds."""

    phases: Phases
    """Seconds by name along the busiest pipeline rank; they add up to the step."""
    memory: tuple[RankMemory, ...]
    """By pipeline rank."""
    tokens_per_s_per_gpu: float
    model_flops_per_s_per_gpu: float
    """Model FLOPs, attention counted over every pair, per second and GPU."""
    mfu: float | None
    """The same, non-causal, over the GPU's dense peak (of bf16 for fp8, as in a run's metrics); None where it is not
    known."""
    capacity_bytes: float
    """Memory of one GPU."""
    guessed: tuple[str, ...]
    host_capacity_bytes: float | None = None
    """Host memory for one GPU; None where it is not known."""
    mfu_causal: float | None = None
    """The MFU with attention counted over the pairs that a causal model computes."""
    not_modelled: tuple[str, ...] = ()
    """What the job asks for and the prediction does not account for."""
    on_cpu: bool = False
    """Whether ranks run on a CPU, and what is said of one GPU is said of one of its ranks."""
    profile: str = ""
    """Which profile of the GPU was used, from where and when, or what its rates are derived from."""

    @property
    def per(self) -> str:
        """What a rank runs on, in words."""
        return "CPU rank" if self.on_cpu else "GPU"

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self.phases.values())

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank that holds most."""
        return max(self.memory, key=lambda rank: rank.device)

    @property
    def fits(self) -> bool:
        """Whether every rank's device and host memory fit."""
        needed = max(rank.needed + rank.outside for rank in self.memory)
        return needed <= self.capacity_bytes and self.host_over_bytes <= 0.0

    @property
    def host_over_bytes(self) -> float:
        """How far a rank's host memory exceeds what is available for one GPU."""
        kept = max(rank.host for rank in self.memory)
        return 0.0 if self.host_capacity_bytes is None else max(0.0, kept - self.host_capacity_bytes)


def predict(
    job: Job,
    cluster: Cluster | Machine,
    software: Software | None = None,
    *,
    every_rank: bool = True,
    held: tuple[RankMemory, ...] | None = None,
    timed: TimedCompute | None = None,
) -> Prediction:
    """Time and memory of one step; `software` is Meshwright's own trainer when not given.

    Without `every_rank` only the pipeline ranks that may be fullest under 1F1B and similar schedules are considered:
    the first two, which hold most micro-batches, and the last, which has the loss, with the one before it if the
    backward is in halves. `held` is what `memory_of` gave for this job, if the caller has it; `timed` is compute that
    was measured, in place of what would be predicted.
    """
    # A profile measures this torch, not other programs.
    own = software is None or software.own
    machine = cluster if isinstance(cluster, Machine) else machine_of(cluster, profiled=own)
    _require_ranks(job, machine)
    require_budget_counts(job)
    software = software or own_software(job, on_cpu=machine.on_cpu)
    layers = stage_layers(job)
    phases = step_phases(job, machine, software, layers, layer_modes(job, layers), timed)
    memory = memory_of(job, software, every_rank=every_rank) if held is None else held
    if machine.measured is not None and machine.on_cpu:
        memory = tuple(replace(rank, outside=machine.measured.profile.process_bytes or 0.0) for rank in memory)
    rate = job.tokens_per_step / sum(phases.values()) / machine.gpus
    flops = rate * flops_per_token(job.model, job.batch.sequence_length, "full")
    peak = mfu_peak_flops(machine.gpu, job.precision.format) if is_known(machine.gpu) else None
    mfu = flops / peak if peak else None
    causal = rate * flops_per_token(job.model, job.batch.sequence_length, "causal") / peak if peak else None
    guesses = _guesses(job, machine, software)
    host, on_cpu = machine.host_bytes, machine.on_cpu
    return Prediction(
        phases,
        memory,
        rate,
        flops,
        mfu,
        machine.memory_bytes,
        guesses,
        host,
        causal,
        not_modelled(job, on_cpu=on_cpu),
        on_cpu,
        machine.profile,
    )


def memory_of(job: Job, software: Software, *, every_rank: bool = True) -> tuple[RankMemory, ...]:
    """What the pipeline ranks hold, all of them or those that may be fullest."""
    table, layers = table_for(job), stage_layers(job)
    modes = layer_modes(job, layers)
    pp = job.layout.pp
    few = {0, min(1, pp - 1), pp - 1}
    if table is not None and table.splits_backward:  # later ranks have more micro-batches between the halves
        few.add(pp - 2)
    ranks = range(pp) if every_rank else sorted(few)
    return tuple(rank_memory(job, software, layers, modes, table, rank) for rank in ranks)


def own_software(job: Job, *, on_cpu: bool = False) -> Software:
    """Meshwright's own trainer as the job runs it; on a CPU transfers use the cores that they could hide behind."""
    own = MESHWRIGHT_COMPILED if job.run.compiles else MESHWRIGHT
    if on_cpu:
        return replace(own, gradient_overlap=False, parameter_overlap=False)
    if job.layout.async_tp:
        own = replace(own, tensor_overlap=True)
    experts = job.model.experts
    if experts is None or job.layout.ep > 1 or job.model.linear_bias or experts.swiglu_limit is not None:
        return own
    return replace(own, weighted_inside=True)


def charged(job: Job, cluster: Cluster | Machine, rank: int) -> Phases:
    """Bytes that a rank of pipeline rank `rank` passes on in a step, as our trainer's time is predicted from them."""
    machine = cluster if isinstance(cluster, Machine) else machine_of(cluster)
    software, layers = own_software(job, on_cpu=machine.on_cpu), stage_layers(job)
    return charged_bytes(job, machine, software, layers, layer_modes(job, layers), rank)


def stage_kinds(job: Job) -> list[tuple[bool, bool, tuple[tuple[bool, str, int], ...]]]:
    """Per stage along the model what its time depends on: whether it is first or last, and of each of its layers
    whether it has experts, how it is recomputed and its attention's window. Stages of one kind compute the same."""
    layers = stage_layers(job)
    modes, model = layer_modes(job, layers), job.model
    kinds = [(model.has_experts(layer), modes[layer], model.window(layer) or 0) for layer in range(model.layers)]
    held = [tuple(sorted(kinds[layer] for layer in own)) for own in stage_ranges(layers)]
    return [(place == 0, place == len(layers) - 1, own) for place, own in enumerate(held)]


def stage_layers(job: Job) -> list[int]:
    """How many layers each stage holds; blocks of extra tokens are the last one's."""
    table = table_for(job)
    stages = 1 if table is None else table.stages // table.parameter_copies
    *before, last = (len(stage) for stage in split_layers(job, stages))
    return [*before, last + job.model.extra_tokens]


def timeline(job: Job, cluster: Cluster, micro_batches: int) -> tuple[Table, Simulation] | None:
    """When every rank of the pipeline does what, for this many of the step's micro-batches; None without a pipeline."""
    layout = job.layout
    if layout.pp == 1:
        return None

    table = build_table(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)
    layers = stage_layers(job)
    machine = machine_of(cluster)
    software = own_software(job, on_cpu=machine.on_cpu)
    times = stage_times(job, machine, software, layers, layer_modes(job, layers), table)
    return table, simulate(table, times)


def _guesses(job: Job, machine: Machine, software: Software) -> tuple[str, ...]:
    assumed = [expert_guess(job, software)] if job.model.experts else []
    if software.own and job.layout.async_tp:
        assumed.append(_pieces_guess(job, machine))
    assumed.extend(_scale_guesses(job))
    if job.model.extra_tokens:
        assumed.append(
            f"model.extra_tokens = {job.model.extra_tokens}: blocks like any other, each with a pass through the head; "
            "not measured on a GPU"
        )
    if machine.measured is None:
        return (*machine.guessed, *assumed)
    far = machine.measured.unmeasured(job.precision.format, products_of(job, software))
    return (*machine.guessed, *assumed, *far, *(_cpu_guesses(job, machine.measured) if machine.on_cpu else ()))


def _pieces_guess(job: Job, machine: Machine) -> str:
    """What is assumed of asynchronous tensor parallelism, in words for an answer."""
    asked, tp = "layout.async_tp = true", job.layout.tp
    if machine.on_cpu:
        return f"{asked}: hides nothing on a CPU"
    if groups_of(job, machine.wires.gpus_per_node).tp.nodes > 1:
        return (
            f"{asked}: hides nothing between nodes, and training refuses it there; lower layout.tp or set it to false"
        )
    return (
        f"{asked}: all but the first of {tp} pieces of every message are hidden, as far as products are long enough; "
        "not measured between GPUs by this project"
    )


def _scale_guesses(job: Job) -> Iterator[str]:
    """What was not measured of fp8 with scales of rows or blocks, or in the head."""
    if job.precision.format == "fp8" and job.precision.fp8_scales != "tensor":
        way = f'precision.fp8_scales = "{job.precision.fp8_scales}"'
        yield f"{way}: as much slower than one scale per tensor as a 1B model on an H200; not measured otherwise"
    if job.precision.format == "fp8" and job.precision.fp8_head:
        seen = "a 1B model on an H200 was 1.5% faster; not measured otherwise"
        yield f"precision.fp8_head = true: as fast as the blocks' products, with casts by their bytes; {seen}"
    if gathers_fp8(job):
        yield "precision.fp8_gather = true: fewer bytes on the wire; widening what arrives is not timed, nor measured"


def _cpu_guesses(job: Job, measured: Measured) -> Iterator[str]:
    """What a profile of a CPU does not measure."""
    if measured.operations is None:
        yield "operations between products: not in the profile of this CPU, which is an old one; calibrate it again"
    elif lacking := measured.lacks(job.precision.format):
        yield f"{lacking} in {job.precision.format}: not in the profile, taken as in fp32; calibrate this CPU again"
    if job.precision.number_bytes < MASTER_BYTES:
        seen = "runs took between half and 1.4 times what was predicted"
        yield f"{job.precision.format} on a CPU: 16-bit formats are measured with few shapes; {seen}"
    if job.data_parallel > 1:
        yield "ranks that share a CPU: runs of two took 1.0 to 1.1 times what was predicted"
    if job.run.compiles:
        yield "compiled blocks on a CPU: their operations are guessed from memory traffic"
    if job.data_parallel > 1 and all(row.zero is None for row in measured.profile.decoders):
        nproc = f"calibrate --nproc {job.data_parallel} measures them"
        yield f"hooks and copies of data parallelism: not in the profile, and counted as nothing; {nproc}"
    elif job.data_parallel > 1 and job.precision.number_bytes < MASTER_BYTES:
        yield f"data parallelism in {job.precision.format}: transfers and copies as measured in fp32"
    if job.layout.tp * job.layout.cp * job.layout.pp > 1:
        yield "calls of tensor, context and pipeline parallelism on a CPU: not measured, and counted as nothing"
    if job.optimizer.name != "adamw" or job.precision.optimizer_states != "fp32":
        yield f"the {job.optimizer.name} update on a CPU: from AdamW's, by the ratio measured on an H200"


def _require_ranks(job: Job, machine: Machine) -> None:
    layout = job.layout
    ranks = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp * layout.pp
    if ranks != machine.gpus:
        there = "ranks on CPUs" if machine.on_cpu else "GPUs"
        raise UserError(
            f"layout needs {ranks} ranks, but the cluster has {machine.gpus} {there}; name one of {ranks} with "
            "--cluster or change the layout"
        )
    require_experts(job)


def layer_modes(job: Job, layers: list[int]) -> list[str]:
    """Every layer's recomputation, those of extra tokens included."""
    asked = job.memory.recompute
    if isinstance(asked, str):
        return [asked] * job.model.blocks
    if isinstance(asked, Every):
        return ["none" if layer % asked.every else "full" for layer in range(job.model.blocks)]
    if isinstance(asked, Segments):
        modes_of = recompute_modes(job, table_for(job), 0)  # for every rank alike
        return [modes_of[layer] for layer in range(job.model.blocks)]
    table = _whole_table(job)
    starts = [sum(layers[:place]) for place in range(len(layers) + 1)]
    modes = ["none"] * job.model.layers
    for rank in range(job.layout.pp):
        held = [0] if table is None else [stage % len(layers) for stage in table.stages_of(rank)]
        chosen = recompute_modes(job, table, rank)
        for layer in (layer for place in held for layer in range(starts[place], starts[place + 1])):
            modes[layer] = chosen[layer]
    return modes


def _whole_table(job: Job) -> Table | None:
    """The table whose holdings decide a budget: gpipe holds every micro-batch, others soon hold all they ever do."""
    return table_of(job) if job.layout.pp > 1 and job.layout.schedule == "gpipe" else table_for(job)
