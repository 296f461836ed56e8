"""A whole step: every stage's times, the simulated schedule, and the communication before, during and after."""

from dataclasses import dataclass, replace
from math import ceil, log2

from meshwright.cost import Elements, stage_elements, tensor_count
from meshwright.job import Job
from meshwright.layout import ranks_of
from meshwright.pipeline import StageTimes, Table, unchecked_table
from meshwright.plan.calls import sharing_of
from meshwright.plan.communication import (
    Wires,
    all_gather_s,
    all_reduce_s,
    broadcast_s,
    group_of,
    reduce_scatter_s,
    send_s,
)
from meshwright.plan.compute import Work, head_work
from meshwright.plan.copies import copies_of
from meshwright.plan.groups import Groups, groups_of, stage_ranges
from meshwright.plan.host import least_s, runs_ahead, step_waits
from meshwright.plan.kept import block_bytes
from meshwright.plan.kernels import Device, device_of
from meshwright.plan.machine import Machine
from meshwright.plan.offload import HOST_UPDATE_BYTES_PER_S, offload_phases, offloads_states
from meshwright.plan.simulate import Played, play, shortened
from meshwright.plan.software import Software
from meshwright.plan.stages import (
    StageCompute,
    StageSeconds,
    boundary_s,
    gathered_bytes,
    hidden_s,
    reduces_every_micro_batch,
    shared_parts,
    stages_of,
    wire_bytes,
)
from meshwright.plan.states import gradient_bytes
from meshwright.plan.update import update_s

Phases = dict[str, float]
_HOST_SHARE = 0.85
"""Fraction of the link to the host that page-locked copies reach (an H200: 55 of 63 GB/s)."""
_UNKNOWN_HOST_LINK = 12e9
"""Bytes per second where the GPU's link to its host is not known: PCIe 3."""
STRAGGLERS = 0.008
"""What every doubling of the nodes adds: all wait for the slowest, and among more nodes the slowest is slower."""


@dataclass(frozen=True)
class TimedCompute:
    """A step's compute as it was measured, rank by rank, where messages took no time."""

    stages: tuple[StageCompute, ...]
    """Along the model."""
    optimizer: tuple[float, ...]
    """Seconds of the update by pipeline rank."""
    host: tuple[float, ...]
    """By pipeline rank, the rest of its step: data, reading the loss."""


MEASURED = ("forward", "backward", "optimizer", "host")
"""The phases of a step with measured compute that are measured."""


def step_phases(
    job: Job,
    machine: Machine,
    software: Software,
    layers: list[int],
    modes: list[str],
    timed: TimedCompute | None = None,
) -> Phases:
    """Seconds of a step by name, adding up to it, along its busiest pipeline rank.

    `layers` are the stages' numbers of layers along the model, `modes` every layer's recomputation; `timed` replaces
    all that is predicted of compute.
    """
    device = device_of(machine.gpu, machine.rates, job.precision.format, machine.measured)
    groups = groups_of(job, machine.wires.gpus_per_node)
    stages = stages_of(
        job,
        device,
        software,
        machine.wires,
        groups,
        layers,
        modes,
        None if timed is None else timed.stages,
        _in_fp32(machine, device),
    )
    table, busiest, bubble = table_for(job), 0, 0.0
    if table is not None:
        played = _play(job, table, stages, boundary_s(job, software, machine.wires, groups))
        busiest, bubble = played.rank, played.makespan_s - played.busy_s
    busy = places_of(table, busiest, len(layers))
    held = _held(job, layers, busy)
    own = [stages[place] for place in busy]
    named = (_compute_phases if timed is None else _measured_phases)(own) | _transfers(own)
    phases = {name: _times(job, table) * seconds for name, seconds in named.items()}
    if table is not None:
        phases["pipeline bubble and sends"] = bubble
    blocks = sum(layers[place] for place in set(busy))
    # What a CPU's ranks measured together is part of their micro-batches.
    together = timed is None and sharing_of(job, device, groups) is not None
    phases |= _once_a_step(job, machine.wires, software, groups, held, blocks, own, reduces=not together)
    mastered = held
    if software.own:
        mastered = sum((part * -1 for part in copies_of(job, layers, table, busiest)), held)
    updated = mastered.owned(job) if job.layout.zero_stage >= 1 else mastered.total
    if timed is not None:
        phases |= {"optimizer": timed.optimizer[busiest], "host": timed.host[busiest]}
        if offloads_states(job):  # it had the host to itself
            phases["updates of other ranks on the host"] = timed.optimizer[busiest] * (_on_a_host(machine) - 1)
    else:
        phases["optimizer"] = update_s(job, device, updated, gradient_bytes(job, software), own=software.own)
        phases["host"] = software.step_s
        phases |= _waits(job, device, software, modes, layers, busy, stages[0], phases)
    if job.memory.offload and timed is None:
        kept = sum(block_bytes(job, software, mode)[0] for mode in modes) / job.layout.pp
        rates = _host_rates(machine)
        phases |= offload_phases(job, updated, kept, sum(phases.values()), *rates, _on_a_host(machine))
        if offloads_states(job):
            phases["optimizer"] = 0.0
    phases["waiting for the slowest node"] = STRAGGLERS * log2(machine.nodes) * sum(phases.values())
    return phases


def _in_fp32(machine: Machine, device: Device) -> Device:
    """A CPU in fp32, in which the decoders were measured that tell what calls take; a GPU as it is."""
    return device if device.operations is None else device_of(machine.gpu, machine.rates, "fp32", machine.measured)


def charged_bytes(
    job: Job, machine: Machine, software: Software, layers: list[int], modes: list[str], rank: int
) -> Phases:
    """Bytes that one rank of the stages of pipeline rank `rank` passes on in a step, as its time is predicted from
    them: by the names of phases, and of "one send" to the next stage.

    The same formulas over links of one byte a second without latency, where nothing is hidden.
    """
    software = replace(software, gradient_overlap=False, parameter_overlap=False, tensor_overlap=False)
    world = ranks_of(job.layout)
    wires, groups, table = Wires(world, 1.0, 0.0, 1.0, 0.0), groups_of(job, world), table_for(job)
    device = device_of(machine.gpu, machine.rates, job.precision.format, machine.measured)
    stages = stages_of(job, replace(device, measured=None), software, wires, groups, layers, modes)
    held = places_of(table, rank, len(layers))
    own, blocks = [stages[place] for place in held], sum(layers[place] for place in set(held))
    phases = {name: _times(job, table) * size for name, size in _transfers(own).items()}
    phases |= _once_a_step(job, wires, software, groups, _held(job, layers, held), blocks, own)
    return phases | {"one send": 0.0 if table is None else boundary_s(job, software, wires, groups)}


def _times(job: Job, table: Table | None) -> float:
    """Micro-batches that pass through each of a rank's stages in a step."""
    return job.accumulation / (table.parameter_copies if table else 1)


def places_of(table: Table | None, rank: int, stages: int) -> list[int]:
    """The stages along the model that a pipeline rank holds, once for each copy of the model."""
    return [0] if table is None else [stage % stages for stage in table.stages_of(rank)]


def _held(job: Job, layers: list[int], places: list[int]) -> Elements:
    """The parameters of some stages that are trained."""
    ranges = stage_ranges(layers)
    ends = {one: {"first": one == 0, "last": one == len(layers) - 1} for one in set(places)}
    found = (stage_elements(job, ranges[one], **ends[one], trained=True) for one in ends)
    return sum(found, Elements())


def _waits(
    job: Job,
    device: Device,
    software: Software,
    modes: list[str],
    layers: list[int],
    busy: list[int],
    first: StageSeconds,
    phases: Phases,
) -> Phases:
    """How long the device waits for its host, beyond what is in its blocks."""
    if runs_ahead(job, device, software):
        heads = head_work(job, device, software) * (1 + job.model.extra_tokens)
        update = None if offloads_states(job) else phases["optimizer"]
        return step_waits(job, device, software, modes, (first.forward, first.backward), heads, update)
    places = stage_ranges(layers)
    own = [modes[layer] for place in set(busy) for layer in places[place]]
    return {"host": phases["host"] + max(0.0, least_s(job, device, software, own) - sum(phases.values()))}


def _on_a_host(machine: Machine) -> int:
    """Ranks that share a host."""
    return min(machine.gpus, machine.wires.gpus_per_node)


def _host_rates(machine: Machine) -> tuple[float, float]:
    """Bytes a second between device and host, and of updates on the host: measured, or the link's usual share."""
    link = machine.gpu.host_link.bytes_per_s if machine.gpu.host_link else _UNKNOWN_HOST_LINK
    profile = machine.measured.profile if machine.measured else None
    between = (profile and profile.to_device_bytes_per_s) or link * _HOST_SHARE
    usual = HOST_UPDATE_BYTES_PER_S["desktop" if machine.gpu.key.startswith("rtx") else "server"]
    return between, (profile and profile.host_update_bytes_per_s) or usual


def _messages(job: Job, software: Software, groups: Groups, parameters: float, layers: int) -> int:
    """Into how many collectives a step's gradients are cut."""
    if software.messages == "buckets":  # Megatron's sizes, made so that a ring's chunks stay large in wide groups
        return max(1, ceil(parameters / max(40e6, 1e6 * groups.data.size)))
    if software.messages == "owners":
        return max(1, min(groups.shard.size, tensor_count(job.model) * layers // job.model.blocks))
    return 1 if software.messages == "whole" else max(1, layers)


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
    device = device_of(machine.gpu, machine.rates, job.precision.format, machine.measured)
    groups = groups_of(job, machine.wires.gpus_per_node)
    wide = _in_fp32(machine, device)
    seconds = _seconds(table, stages_of(job, device, software, machine.wires, groups, layers, modes, wide=wide))
    forward, backward, to_input, to_weights = zip(*seconds, strict=True)
    return StageTimes(forward, backward, to_input, to_weights, boundary_s(job, software, machine.wires, groups))


def _play(job: Job, table: Table, stages: list[StageSeconds], send: float) -> Played:
    layout, seconds = job.layout, _seconds(table, stages)
    return play(layout.schedule, layout.pp, job.accumulation, layout.virtual_stages, seconds, send)


def _seconds(table: Table, stages: list[StageSeconds]) -> list[tuple[float, float, float, float]]:
    """Per stage of the table: forward, whole backward, and its two halves."""
    along = [stages[place] for chain in table.chains for place in range(len(chain))]
    return [(one.forward, one.backward, one.backward - one.work.weight_matmul, one.work.weight_matmul) for one in along]


def _compute_phases(stages: list[StageSeconds]) -> Phases:
    total = sum((stage.work for stage in stages), Work())
    return {
        "forward products": total.forward_matmul,
        "forward attention": total.forward_attention,
        "forward elementwise": total.forward_elementwise,
        "backward products": total.input_matmul + total.weight_matmul,
        "backward attention": total.backward_attention,
        "backward elementwise": total.backward_elementwise,
        "recomputation": total.again,
    }


def _measured_phases(stages: list[StageSeconds]) -> Phases:
    total = sum((stage.work for stage in stages), Work())
    return {"forward": total.forward, "backward": total.backward}


def _transfers(stages: list[StageSeconds]) -> Phases:
    """What is exposed of the messages of every micro-batch."""
    named = {
        "tensor and context transfers": sum(stage.tensor_forward + stage.tensor_backward for stage in stages),
        "parameter and gradient transfers": sum(stage.gather_forward + stage.gather_backward for stage in stages),
    }
    if exchanged := sum(stage.expert_forward + stage.expert_backward for stage in stages):
        named["rows to experts and back"] = exchanged
    return named


def _once_a_step(
    job: Job,
    wires: Wires,
    software: Software,
    groups: Groups,
    elements: Elements,
    layers: int,
    stages: list[StageSeconds],
    *,
    reduces: bool = True,
) -> Phases:
    """Gradients reduced and parameters gathered once a step, beside one micro-batch of a rank's stages."""
    layout = job.layout
    wide = wire_bytes(job, software)
    reduce = gather = 0.0
    parts = _messages(job, software, groups, elements.total, layers)
    once = reduces and not reduces_every_micro_batch(job)
    sent = gathered_bytes(job, software, elements, layers)
    for size, (count, sharers, everyone) in zip(sent, shared_parts(elements, groups), strict=False) if once else ():
        share = wide * count / parts
        if layout.zero_stage >= 1 and sharers.size > 1:
            owned = software.messages == "owners"
            reduce += (broadcast_s if owned else reduce_scatter_s)(wires, sharers, share)
            reduce += all_reduce_s(wires, groups.replicate, share / sharers.size)
            gather += (broadcast_s if owned else all_gather_s)(wires, sharers, size / parts)
        else:
            reduce += all_reduce_s(wires, everyone, share)
    forward, backward = sum(stage.forward for stage in stages), sum(stage.backward for stage in stages)
    reduce = hidden_s(parts * reduce, backward, parts, software.gradient_overlap) if reduce else 0.0
    gather = hidden_s(parts * gather, forward, parts, software.parameter_overlap) if gather else 0.0
    tied = 0.0
    if (job.model.tied or job.model.extra_tokens) and layout.pp > 1:  # the last stage has the embedding too
        table = job.model.vocab_size * job.model.width / layout.tp
        tied = all_reduce_s(wires, group_of(2, wires.gpus_per_node, wires.gpus_per_node), wide * table)
    phases = {"gradient reduction": reduce + tied, "parameter gathering": gather}
    both = table_for(job)
    if both is not None and both.parameter_copies > 1:  # after shards are reduced, each copy sends its own to the other
        sharded = layout.zero_stage >= 1
        own = (wide * count / (sharers.size if sharded else 1) for count, sharers, _ in shared_parts(elements, groups))
        phases["gradients between copies"] = send_s(wires, sum(own), within_node=groups.stages_share_node)
    return phases
