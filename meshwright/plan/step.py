"""A whole step: every stage's times, the simulated schedule, and the communication before, during and after."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, log2

from meshwright.cost import REPEATED, stage_parameters, tensor_count
from meshwright.job import Job
from meshwright.pipeline import StageTimes, Table, unchecked_table
from meshwright.plan.calls import block_calls_s, ends_calls_s, sharding_calls_s
from meshwright.plan.communication import (
    Group,
    Wires,
    all_gather_s,
    all_reduce_s,
    broadcast_s,
    group_of,
    reduce_scatter_s,
    send_s,
)
from meshwright.plan.compute import (
    USUAL_LAUNCH_S,
    Work,
    block_work,
    embedding_work,
    head_work,
    host_waits,
    products_of,
    tokens_of,
)
from meshwright.plan.context import context_s
from meshwright.plan.host import least_s, runs_ahead, step_waits
from meshwright.plan.kernels import Device, device_of
from meshwright.plan.machine import Machine
from meshwright.plan.memory import block_bytes, gradient_bytes
from meshwright.plan.offload import HOST_UPDATE_BYTES_PER_S, offload_phases, offloads_states
from meshwright.plan.simulate import Played, play, shortened
from meshwright.plan.software import Software
from meshwright.plan.update import update_s

Phases = dict[str, float]
_HOST_SHARE = 0.85
"""Fraction of the link to the host that page-locked copies reach (an H200: 55 of 63 GB/s)."""
_UNKNOWN_HOST_LINK = 12e9
"""Bytes per second where the GPU's link to its host is not known: PCIe 3."""
STRAGGLERS = 0.008
"""What every doubling of the nodes adds: all wait for the slowest, and among more nodes the slowest is slower."""
_LISTED_LAUNCHES = 2
"""The host's work for one tensor of a list that a collective is over: a view of it, and a copy."""
CONTENTION = 0.189
"""What compute loses while a collective runs beside it and takes multiprocessors and memory bandwidth: the mean over
training on A100, H100 and AMD's cards (arXiv:2507.03114)."""
_COPIED = 0.06
"""The same beside transfers of copy engines, which take memory bandwidth and power alone."""


@dataclass(frozen=True)
class Groups:
    """The ranks a rank shares each axis with."""

    tp: Group
    cp: Group
    shard: Group
    """dp_shard × cp: who shares states and gradients."""
    replicate: Group
    data: Group
    """Everyone who holds the same parameters."""
    stages_share_node: bool


@dataclass(frozen=True)
class StageSeconds:
    """One stage over one micro-batch."""

    work: Work
    tensor_forward: float
    tensor_backward: float
    gather_forward: float
    """Exposed parameter gathering and gradient scattering, of every micro-batch."""
    gather_backward: float

    @property
    def forward(self) -> float:
        """Its forward, transfers included."""
        return self.work.forward + self.tensor_forward + self.gather_forward

    @property
    def backward(self) -> float:
        """Its backward."""
        return self.work.backward + self.tensor_backward + self.gather_backward


def groups_of(job: Job, gpus_per_node: int) -> Groups:
    """Which ranks are on which nodes, numbered as in the mesh."""
    layout = job.layout
    inner = layout.tp * layout.cp
    data_stride = inner * (layout.pp if layout.order == "dp-outside" else 1)
    pipe_stride = inner * (1 if layout.order == "dp-outside" else layout.dp_shard * layout.dp_replicate)
    return Groups(
        tp=group_of(layout.tp, 1, gpus_per_node),
        cp=group_of(layout.cp, layout.tp, gpus_per_node),
        shard=group_of(layout.dp_shard * layout.cp, layout.tp if data_stride == inner else data_stride, gpus_per_node),
        replicate=group_of(layout.dp_replicate, data_stride * layout.dp_shard, gpus_per_node),
        data=group_of(
            layout.dp_shard * layout.dp_replicate * layout.cp,
            layout.tp if data_stride == inner else data_stride,
            gpus_per_node,
        ),
        stages_share_node=pipe_stride * layout.pp <= gpus_per_node,
    )


def step_phases(job: Job, machine: Machine, software: Software, layers: list[int], modes: list[str]) -> Phases:
    """Seconds of a step by name, adding up to it, along its busiest pipeline rank.

    `layers` are the stages' numbers of layers along the model, `modes` every layer's recomputation.
    """
    device = device_of(machine.gpu, machine.rates, job.precision.compute, machine.measured)
    groups = groups_of(job, machine.wires.gpus_per_node)
    stages = _stages(job, device, software, machine.wires, groups, layers, modes)
    table, busy, bubble = table_for(job), [0], 0.0
    if table is not None:
        played = _play(job, table, stages, _boundary_s(job, software, machine.wires, groups))
        busy = [stage % len(layers) for stage in table.stages_of(played.rank)]
        bubble = played.makespan_s - played.busy_s
    copies = table.parameter_copies if table else 1
    phases = _compute_phases([stages[place] for place in busy], job.accumulation / copies)
    if table is not None:
        phases["pipeline bubble and sends"] = bubble
    held = sum(
        stage_parameters(job, layers[place], first=place == 0, last=place == len(layers) - 1) for place in set(busy)
    )
    window = sum(stages[place].backward for place in busy), sum(stages[place].forward for place in busy)
    blocks = sum(layers[place] for place in set(busy))
    phases |= _once_a_step(job, machine, software, device, groups, held, blocks, *window)
    if runs_ahead(job, device, software):
        head, update = head_work(job, device, software), None if offloads_states(job) else phases["optimizer"]
        passes = stages[0].forward, stages[0].backward
        phases |= step_waits(job, device, software, modes, passes, head, update)
    else:
        starts = [sum(layers[:place]) for place in range(len(layers))]
        own = [mode for place in set(busy) for mode in modes[starts[place] : starts[place] + layers[place]]]
        phases["host"] += max(0.0, least_s(job, device, software, own) - sum(phases.values()))
    if job.memory.offload:
        owners = groups.shard.size if job.layout.zero_stage >= 1 else 1
        kept = sum(block_bytes(job, software, mode)[0] for mode in modes) / job.layout.pp
        ranks = min(machine.gpus, machine.wires.gpus_per_node)
        rates = _host_rates(machine)
        phases |= offload_phases(job, held / owners, kept, sum(phases.values()), *rates, ranks)
        if offloads_states(job):
            phases["optimizer"] = 0.0
    phases["waiting for the slowest node"] = STRAGGLERS * log2(machine.nodes) * sum(phases.values())
    return phases


def _host_rates(machine: Machine) -> tuple[float, float]:
    """Bytes a second between device and host, and of updates on the host: measured, or the link's usual share."""
    link = machine.gpu.host_link.bytes_per_s if machine.gpu.host_link else _UNKNOWN_HOST_LINK
    profile = machine.measured.profile if machine.measured else None
    between = (profile and profile.to_device_bytes_per_s) or link * _HOST_SHARE
    usual = HOST_UPDATE_BYTES_PER_S["desktop" if machine.gpu.key.startswith("rtx") else "server"]
    return between, (profile and profile.host_update_bytes_per_s) or usual


def _stages(
    job: Job, device: Device, software: Software, wires: Wires, groups: Groups, layers: list[int], modes: list[str]
) -> list[StageSeconds]:
    blocks, tensor = {}, {}
    for mode in set(modes):
        work = block_work(job, device, software, mode)
        forward, backward = shared_s(job, device, software, wires, groups, mode, work)
        if device.operations is not None:  # a CPU is its own host
            waits = block_calls_s(job.model.positions, device, software, mode)
        elif runs_ahead(job, device, software):  # the waits of a whole step are counted at once
            waits = 0.0, 0.0
        else:
            waits = host_waits(job, device, software, mode, work.forward + forward, work.backward + backward)
        blocks[mode] = replace(
            work,
            forward_elementwise=work.forward_elementwise + waits[0],
            backward_elementwise=work.backward_elementwise + waits[1],
        )
        tensor[mode] = forward, backward
    stages, place = [], 0
    for number, count in enumerate(layers):
        own = modes[place : place + count]
        place += count
        first, last = number == 0, number == len(layers) - 1
        work, forward, backward = Work(), 0.0, 0.0
        for mode in set(own):
            times = own.count(mode)
            work += blocks[mode] * times
            forward += tensor[mode][0] * times
            backward += tensor[mode][1] * times
        if first:
            work += embedding_work(job, device)
        if last:
            work += head_work(job, device, software)
            calls = ends_calls_s(job.model.positions, device, software)
            work += Work(forward_elementwise=calls[0], backward_elementwise=calls[1])
        parameters = stage_parameters(job, count, first=first, last=last)
        gathers = _gather_s(job, wires, groups, parameters, max(1, count), work, forward, backward, software)
        hooks = sharding_calls_s(job.layout.zero_stage, device, wires) if job.data_parallel > 1 else (0.0, 0.0)
        gathers = gathers[0] + count * hooks[0], gathers[1] + count * hooks[1]
        stages.append(StageSeconds(work, forward, backward, *gathers))
    return stages


def shared_s(
    job: Job, device: Device, software: Software, wires: Wires, groups: Groups, mode: str, work: Work
) -> tuple[float, float]:
    """What tensor and context parallelism add to a block's forward and backward: transfers, as far as its `work` does
    not hide them, and what is merged."""
    layout, tokens = job.layout, tokens_of(job)
    size = job.precision.number_bytes * tokens * job.model.width
    # An all-reduce is a reduce-scatter and an all-gather: with sequence parallelism the two are apart, not more.
    once = 2 * all_reduce_s(wires, groups.tp, size)
    forward, backward, repeated = once, once, once if mode in REPEATED else 0.0
    if mode == "selective" and software.selective == "half" and layout.sp:
        repeated = once / 2  # what is scattered is kept, and gathered again
    if software.tensor_overlap:
        forward = _piecewise(forward, work.forward_matmul, layout.tp)
        backward = _piecewise(backward, work.input_matmul, layout.tp)
        repeated = _piecewise(repeated, work.forward_matmul, layout.tp)
    if layout.sp and software.regather:
        # What was scattered is gathered again for the weights' gradients while those of the inputs are computed.
        again = 2 * all_gather_s(wires, groups.tp, size)
        share = _COPIED if software.tensor_overlap else CONTENTION
        backward += max(0.0, again - work.input_matmul) + share * min(again, work.input_matmul)
    backward += repeated
    attention = work.forward_attention, work.backward_attention
    ahead, back = context_s(job, device, wires, groups.cp, attention, CONTENTION)
    return forward + ahead, backward + back + (ahead if mode in REPEATED else 0.0)


def _piecewise(transfer: float, product: float, pieces: int) -> float:
    """What is left of transfers that run in pieces beside a product: the first of them, or what the product is too
    short for."""
    hidden = min(transfer * (1 - 1 / pieces), product)
    return transfer - hidden + _COPIED * hidden


def _gather_s(
    job: Job,
    wires: Wires,
    groups: Groups,
    parameters: float,
    layers: int,
    work: Work,
    tensor_forward: float,
    tensor_backward: float,
    software: Software,
) -> tuple[float, float]:
    """Parameters gathered and gradients scattered with every micro-batch, as far as the compute does not hide them."""
    if not _reduces_every_micro_batch(job) or groups.shard.size == 1:
        return 0.0, 0.0
    wide, parts, host = _wire_bytes(job, software), layers, 0.0
    if software.gathers == "weight":
        parts = layers * len(list(products_of(job, software)))
        host = parts * groups.shard.size * _LISTED_LAUNCHES * USUAL_LAUNCH_S
    gather = host + all_gather_s(wires, groups.shard, job.precision.number_bytes * parameters / parts) * parts
    scatter = host + reduce_scatter_s(wires, groups.shard, wide * parameters / parts) * parts
    scatter += all_reduce_s(wires, groups.replicate, wide * parameters / parts / groups.shard.size) * parts
    gathers_forward = gather if job.layout.zero_stage == 3 or job.accumulation == 1 else gather / job.accumulation
    again = gather if job.layout.zero_stage == 3 else 0.0
    if software.gathers == "weight" and job.memory.recompute == "full":
        again *= 2
    ahead = job.layout.prefetch > 0  # else every block waits for its own parameters
    forward = _hidden(gathers_forward, work.forward + tensor_forward, layers, ahead and software.parameter_overlap)
    beside = scatter + (again if ahead else 0.0)
    backward = _hidden(beside, work.backward + tensor_backward, layers, software.gradient_overlap)
    return forward, backward + (0.0 if ahead else again)


def _reduces_every_micro_batch(job: Job) -> bool:
    """Under a pipeline gradients stay whole until the step's end, but for those of parameters that are sharded too."""
    return job.layout.zero_stage == 3 or (job.layout.zero_stage == 2 and job.layout.pp == 1)


def _wire_bytes(job: Job, software: Software) -> int:
    """Bytes of a gradient while it is reduced."""
    return software.reduced_bytes or job.precision.gradient_bytes


def _messages(job: Job, software: Software, groups: Groups, parameters: float, layers: int) -> int:
    """Into how many collectives a step's gradients are cut."""
    if software.messages == "buckets":  # Megatron's sizes, made so that a ring's chunks stay large in wide groups
        return max(1, ceil(parameters / max(40e6, 1e6 * groups.data.size)))
    if software.messages == "owners":
        return max(1, min(groups.shard.size, tensor_count(job.model) * layers // job.model.layers))
    return 1 if software.messages == "whole" else max(1, layers)


def _hidden(transfers: float, compute: float, layers: int, overlaps: bool) -> float:
    """What transfers add to the compute they overlap: the first of them, what compute cannot hide, and its slowdown."""
    if not overlaps:
        return transfers
    return max(transfers / layers, transfers - compute) + CONTENTION * min(transfers, compute)


def _boundary_s(job: Job, software: Software, wires: Wires, groups: Groups) -> float:
    """Bytes sent from one stage to the next."""
    size = job.precision.number_bytes * tokens_of(job) * job.model.width
    within = groups.stages_share_node
    if job.layout.tp > 1 and (software.scatter_sends or job.layout.sp):
        send = send_s(wires, size / job.layout.tp, within_node=within)
        return send + (0.0 if job.layout.sp else all_gather_s(wires, groups.tp, size))
    # Copies of the same values leave every tensor-parallel rank over its own share of the network.
    return send_s(wires, size, within_node=within)


def table_for(job: Job) -> Table | None:
    """The schedule's table, a long one with fewer micro-batches; None without a pipeline."""
    layout = job.layout
    if layout.pp == 1:
        return None
    return unchecked_table(layout.schedule, layout.pp, shortened(layout.pp, job.accumulation), layout.virtual_stages)


def stage_times(
    job: Job, machine: Machine, software: Software, layers: list[int], modes: list[str], table: Table
) -> StageTimes:
    """What every stage of a table takes over one micro-batch, for simulating a step's schedule."""
    device = device_of(machine.gpu, machine.rates, job.precision.compute, machine.measured)
    groups = groups_of(job, machine.wires.gpus_per_node)
    seconds = _seconds(table, _stages(job, device, software, machine.wires, groups, layers, modes))
    forward, backward, to_input, to_weights = zip(*seconds, strict=True)
    return StageTimes(forward, backward, to_input, to_weights, _boundary_s(job, software, machine.wires, groups))


def _play(job: Job, table: Table, stages: list[StageSeconds], send: float) -> Played:
    layout, seconds = job.layout, _seconds(table, stages)
    return play(layout.schedule, layout.pp, job.accumulation, layout.virtual_stages, seconds, send)


def _seconds(table: Table, stages: list[StageSeconds]) -> list[tuple[float, float, float, float]]:
    """Per stage of the table: forward, whole backward, and its two halves."""
    along = [stages[place] for chain in table.chains for place in range(len(chain))]
    return [(one.forward, one.backward, one.backward - one.work.weight_matmul, one.work.weight_matmul) for one in along]


def _compute_phases(stages: list[StageSeconds], micro_batches: float) -> Phases:
    total = sum((stage.work for stage in stages), Work())
    named = {
        "forward products": total.forward_matmul,
        "forward attention": total.forward_attention,
        "forward elementwise": total.forward_elementwise,
        "backward products": total.input_matmul + total.weight_matmul,
        "backward attention": total.backward_attention,
        "backward elementwise": total.backward_elementwise,
        "recomputation": total.again,
        "tensor and context transfers": sum(stage.tensor_forward + stage.tensor_backward for stage in stages),
        "parameter and gradient transfers": sum(stage.gather_forward + stage.gather_backward for stage in stages),
    }
    return {name: micro_batches * seconds for name, seconds in named.items()}


def _once_a_step(
    job: Job,
    machine: Machine,
    software: Software,
    device: Device,
    groups: Groups,
    parameters: float,
    layers: int,
    backward: float,
    forward: float,
) -> Mapping[str, float]:
    """Gradients reduced and parameters gathered once a step, the optimizer, and the host's own work."""
    layout, wires = job.layout, machine.wires
    wide = _wire_bytes(job, software)
    reduce = gather = 0.0
    parts = _messages(job, software, groups, parameters, layers)
    if not _reduces_every_micro_batch(job):
        share, sharers = wide * parameters / parts, groups.shard
        if layout.zero_stage >= 1 and sharers.size > 1:
            owned = software.messages == "owners"
            reduce = (broadcast_s if owned else reduce_scatter_s)(wires, sharers, share)
            reduce += all_reduce_s(wires, groups.replicate, share / sharers.size)
            gathered = job.precision.number_bytes * parameters / parts
            gather = (broadcast_s if owned else all_gather_s)(wires, sharers, gathered)
        else:
            reduce = all_reduce_s(wires, groups.data, share)
    reduce = _hidden(parts * reduce, backward, parts, software.gradient_overlap) if reduce else 0.0
    gather = _hidden(parts * gather, forward, parts, software.parameter_overlap) if gather else 0.0
    owners = groups.shard.size if layout.zero_stage >= 1 else 1
    tied = 0.0
    if job.model.tied and layout.pp > 1:
        table = job.model.vocab_size * job.model.width / layout.tp
        tied = all_reduce_s(wires, group_of(2, wires.gpus_per_node, wires.gpus_per_node), wide * table)
    return {
        "gradient reduction": reduce + tied,
        "parameter gathering": gather,
        "optimizer": update_s(job, device, parameters / owners, gradient_bytes(job, software), own=software.own),
        "host": software.step_s,
    }
