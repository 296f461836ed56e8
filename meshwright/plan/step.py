"""A whole step: every stage's times, the simulated schedule, and the communication before, during and after."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, log2

from meshwright.cost import REPEATED, Elements, stage_elements, tensor_count
from meshwright.job import Job
from meshwright.pipeline import StageTimes, Table, unchecked_table
from meshwright.plan.calls import block_calls_s, ends_calls_s, sharding_calls_s
from meshwright.plan.communication import (
    CONTENTION,
    Group,
    Wires,
    all_gather_s,
    all_reduce_s,
    broadcast_s,
    group_of,
    reduce_scatter_s,
    send_s,
)
from meshwright.plan.compute import Work, block_work, embedding_work, head_work, products_of, tokens_of
from meshwright.plan.context import context_s
from meshwright.plan.experts import transfers_s, without_experts
from meshwright.plan.groups import Groups, groups_of, stage_ranges
from meshwright.plan.host import least_s, runs_ahead, step_waits
from meshwright.plan.kept import block_bytes
from meshwright.plan.kernels import Device, device_of
from meshwright.plan.launches import USUAL_LAUNCH_S, host_waits
from meshwright.plan.machine import Machine
from meshwright.plan.memory import gradient_bytes
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
_COPIED = 0.06
"""The same beside transfers of copy engines, which take memory bandwidth and power alone."""


@dataclass(frozen=True)
class StageSeconds:
    """One stage over one micro-batch."""

    work: Work
    tensor_forward: float
    tensor_backward: float
    gather_forward: float
    """Exposed parameter gathering and gradient scattering, of every micro-batch."""
    gather_backward: float
    expert_forward: float = 0.0
    """Rows on their way to their experts and back, as far as nothing hides them."""
    expert_backward: float = 0.0

    @property
    def forward(self) -> float:
        """Its forward, transfers included."""
        return self.work.forward + self.tensor_forward + self.gather_forward + self.expert_forward

    @property
    def backward(self) -> float:
        """Its backward."""
        return self.work.backward + self.tensor_backward + self.gather_backward + self.expert_backward


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
    places = stage_ranges(layers)
    held = sum(
        (stage_elements(job, places[one], first=one == 0, last=one == len(layers) - 1) for one in set(busy)),
        Elements(),
    )
    window = sum(stages[place].backward for place in busy), sum(stages[place].forward for place in busy)
    blocks = sum(layers[place] for place in set(busy))
    phases |= _once_a_step(job, machine, software, device, groups, held, blocks, *window)
    if runs_ahead(job, device, software):
        head, update = head_work(job, device, software), None if offloads_states(job) else phases["optimizer"]
        passes = stages[0].forward, stages[0].backward
        phases |= step_waits(job, device, software, modes, passes, head, update)
    else:
        own = [modes[layer] for place in set(busy) for layer in places[place]]
        phases["host"] += max(0.0, least_s(job, device, software, own) - sum(phases.values()))
    if job.memory.offload:
        owned = held.owned(job) if job.layout.zero_stage >= 1 else held.total
        kept = sum(block_bytes(job, software, mode)[0] for mode in modes) / job.layout.pp
        ranks = min(machine.gpus, machine.wires.gpus_per_node)
        rates = _host_rates(machine)
        phases |= offload_phases(job, owned, kept, sum(phases.values()), *rates, ranks)
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
    dense = job.model.experts.first_dense if job.model.experts else 0
    kinds = [(layer < dense, mode) for layer, mode in enumerate(modes)]
    blocks = {
        kind: _block(without_experts(job) if kind[0] else job, device, software, wires, groups, kind[1])
        for kind in set(kinds)
    }
    stages = []
    for number, own in enumerate(stage_ranges(layers)):
        count = len(own)
        first, last = number == 0, number == len(layers) - 1
        work, forward, backward, sent, returned = Work(), 0.0, 0.0, 0.0, 0.0
        held = [kinds[layer] for layer in own]
        for kind in set(held):
            times, block = held.count(kind), blocks[kind]
            work += block.work * times
            forward += block.tensor_forward * times
            backward += block.tensor_backward * times
            sent += block.expert_forward * times
            returned += block.expert_backward * times
        if first:
            work += embedding_work(job, device)
        if last:
            work += head_work(job, device, software)
            calls = ends_calls_s(job.model.positions, device, software)
            work += Work(forward_elementwise=calls[0], backward_elementwise=calls[1])
        elements = stage_elements(job, own, first=first, last=last)
        beside = work.forward + forward + sent, work.backward + backward + returned
        gathers = _gather_s(job, wires, groups, elements, max(1, count), beside, software)
        hooks = sharding_calls_s(job.layout.zero_stage, device, wires) if job.data_parallel > 1 else (0.0, 0.0)
        gathers = gathers[0] + count * hooks[0], gathers[1] + count * hooks[1]
        stages.append(StageSeconds(work, forward, backward, *gathers, sent, returned))
    return stages


def _block(job: Job, device: Device, software: Software, wires: Wires, groups: Groups, mode: str) -> StageSeconds:
    """One block as a stage of its own, without what is gathered for it."""
    work = block_work(job, device, software, mode)
    forward, backward = shared_s(job, device, software, wires, groups, mode, work)
    sent, returned = transfers_s(job, wires, groups.experts, software, mode, (work.forward, work.backward))
    if device.operations is not None:  # a CPU is its own host
        waits = block_calls_s(job.model.positions, device, software, mode)
    elif runs_ahead(job, device, software):  # the waits of a whole step are counted at once
        waits = 0.0, 0.0
    else:
        passes = work.forward + forward + sent, work.backward + backward + returned
        waits = host_waits(job, device, software, mode, *passes)
    waited = replace(
        work,
        forward_elementwise=work.forward_elementwise + waits[0],
        backward_elementwise=work.backward_elementwise + waits[1],
    )
    return StageSeconds(waited, forward, backward, 0.0, 0.0, sent, returned)


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
    elements: Elements,
    layers: int,
    beside: tuple[float, float],
    software: Software,
) -> tuple[float, float]:
    """Parameters gathered and gradients scattered with every micro-batch, as far as what runs `beside` them, in the
    forward and in the backward, does not hide them."""
    if not _reduces_every_micro_batch(job) or groups.shard.size == 1:
        return 0.0, 0.0
    wide, parts, host = _wire_bytes(job, software), layers, 0.0
    if software.gathers == "weight":
        parts = layers * len(list(products_of(job, software)))
        host = parts * groups.shard.size * _LISTED_LAUNCHES * USUAL_LAUNCH_S
    gather = scatter = host
    for count, shard, _ in _shared_parts(elements, groups):
        gather += all_gather_s(wires, shard, job.precision.number_bytes * count / parts) * parts
        scatter += reduce_scatter_s(wires, shard, wide * count / parts) * parts
        scatter += all_reduce_s(wires, groups.replicate, wide * count / parts / shard.size) * parts
    gathers_forward = gather if job.layout.zero_stage == 3 or job.accumulation == 1 else gather / job.accumulation
    again = gather if job.layout.zero_stage == 3 else 0.0
    if software.gathers == "weight" and job.memory.recompute == "full":
        again *= 2
    ahead = job.layout.prefetch > 0  # else every block waits for its own parameters
    forward = _hidden(gathers_forward, beside[0], layers, ahead and software.parameter_overlap)
    exposed = scatter + (again if ahead else 0.0)
    backward = _hidden(exposed, beside[1], layers, software.gradient_overlap)
    return forward, backward + (0.0 if ahead else again)


def _shared_parts(elements: Elements, groups: Groups) -> Iterator[tuple[float, Group, Group]]:
    """Parameters with who shares their states and who holds the same: experts, and all others."""
    yield elements.plain, groups.shard, groups.data
    if elements.experts:
        yield elements.experts, groups.expert_shard, groups.expert_data


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
    if exchanged := sum(stage.expert_forward + stage.expert_backward for stage in stages):
        named["rows to experts and back"] = exchanged
    return {name: micro_batches * seconds for name, seconds in named.items()}


def _once_a_step(
    job: Job,
    machine: Machine,
    software: Software,
    device: Device,
    groups: Groups,
    elements: Elements,
    layers: int,
    backward: float,
    forward: float,
) -> Mapping[str, float]:
    """Gradients reduced and parameters gathered once a step, the optimizer, and the host's own work."""
    layout, wires = job.layout, machine.wires
    wide = _wire_bytes(job, software)
    reduce = gather = 0.0
    parts = _messages(job, software, groups, elements.total, layers)
    for count, sharers, everyone in () if _reduces_every_micro_batch(job) else _shared_parts(elements, groups):
        share = wide * count / parts
        if layout.zero_stage >= 1 and sharers.size > 1:
            owned = software.messages == "owners"
            reduce += (broadcast_s if owned else reduce_scatter_s)(wires, sharers, share)
            reduce += all_reduce_s(wires, groups.replicate, share / sharers.size)
            gathered = job.precision.number_bytes * count / parts
            gather += (broadcast_s if owned else all_gather_s)(wires, sharers, gathered)
        else:
            reduce += all_reduce_s(wires, everyone, share)
    reduce = _hidden(parts * reduce, backward, parts, software.gradient_overlap) if reduce else 0.0
    gather = _hidden(parts * gather, forward, parts, software.parameter_overlap) if gather else 0.0
    updated = elements.owned(job) if layout.zero_stage >= 1 else elements.total
    tied = 0.0
    if job.model.tied and layout.pp > 1:
        table = job.model.vocab_size * job.model.width / layout.tp
        tied = all_reduce_s(wires, group_of(2, wires.gpus_per_node, wires.gpus_per_node), wide * table)
    return {
        "gradient reduction": reduce + tied,
        "parameter gathering": gather,
        "optimizer": update_s(job, device, updated, gradient_bytes(job, software), own=software.own),
        "host": software.step_s,
    }
