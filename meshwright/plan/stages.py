"""What every stage takes over one micro-batch: its compute, predicted or measured, and transfers that nothing hides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from meshwright.cost import REPEATED, Elements, layer_frozen, stage_elements
from meshwright.job import Job
from meshwright.layout import gathers_fp8
from meshwright.plan.calls import Sharing, block_calls_s, ends_calls_s, sharing_of
from meshwright.plan.communication import (
    CONTENTION,
    Group,
    Wires,
    all_gather_s,
    all_reduce_s,
    reduce_scatter_s,
    send_s,
)
from meshwright.plan.compute import Work, block_work, embedding_work, head_work, products_of, tokens_of
from meshwright.plan.context import context_s, merged_s
from meshwright.plan.encoder import encoder_sums_s, encoder_work
from meshwright.plan.experts import transfers_s, without_experts
from meshwright.plan.extra_tokens import extra_work
from meshwright.plan.groups import Groups, stage_ranges
from meshwright.plan.host import runs_ahead
from meshwright.plan.kernels import Device
from meshwright.plan.launches import USUAL_LAUNCH_S, host_waits
from meshwright.plan.software import Software

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


@dataclass(frozen=True)
class StageCompute:
    """What one stage computed over one micro-batch, measured where messages took no time."""

    forward: float
    backward: float
    """All of it, recomputation included."""
    weights: float | None = None
    """The part of it that a schedule may run later, if it was measured apart."""


Pace = tuple[float, float, float]
"""How many times as long as predicted a stage took: forward, the backward's first half, and its second."""


def stages_of(
    job: Job,
    device: Device,
    software: Software,
    wires: Wires,
    groups: Groups,
    layers: list[int],
    modes: list[str],
    timed: Sequence[StageCompute] | None = None,
    wide: Device | None = None,
) -> list[StageSeconds]:
    """Every stage along the model; with `timed`, their compute is what was measured. `wide` is a CPU in fp32, in which
    its calls were measured.

    A measured stage has the predicted shares of products and attention, which some transfers hide behind. It includes
    what the host, sharding's hooks and merged attention add to the device's time.
    """
    dense = job.model.experts.first_dense if job.model.experts else 0
    kinds = [(layer < dense, mode) for layer, mode in enumerate(modes)]

    @cache
    def block_of(kind: tuple[bool, str], pace: Pace | None) -> StageSeconds:
        return _block(
            without_experts(job) if kind[0] else job, device, wide or device, software, wires, groups, kind[1], pace
        )

    stages = []
    for number, own in enumerate(stage_ranges(layers)):
        count = len(own)
        first, last = number == 0, number == len(layers) - 1
        work, forward, backward, sent, returned = Work(), 0.0, 0.0, 0.0, 0.0
        held = [kinds[layer] for layer in own]
        ends = Work()
        if first:
            ends += embedding_work(job, device) + encoder_work(job, device, software)
        if last:
            ends += head_work(job, device, software) + extra_work(job, device, software)
        pace = None
        if timed is not None:
            models = [without_experts(job) if kind[0] else job for kind in held]
            works = (block_work(model, device, software, kind[1]) for model, kind in zip(models, held, strict=True))
            pace = _pace(timed[number], sum(works, ends))
            ends = ends.scaled(*pace)
        for kind in set(held):
            times, block = held.count(kind), block_of(kind, pace)
            work += block.work * times
            forward += block.tensor_forward * times
            backward += block.tensor_backward * times
            sent += block.expert_forward * times
            returned += block.expert_backward * times
        work += ends
        sums = encoder_sums_s(job, wires, groups) if first else (0.0, 0.0)
        met = _ends_s(job, wires, groups, software, first=first, last=last)
        forward, backward = forward + met[0] + sums[0], backward + met[1] + sums[1]
        if last and timed is None:
            calls = ends_calls_s(job.model.positions, wide or device, software)
            work += Work(forward_elementwise=calls[0], backward_elementwise=calls[1])
        # What is not trained has no gradients to reduce, and is gathered only where parameters are sharded.
        elements = stage_elements(job, own, first=first, last=last, trained=job.layout.zero_stage < 3)
        sharing = None if timed is not None else sharing_of(job, device, groups)
        if sharing is not None:
            gathers = _shared_s(job, sharing, count, last, elements.total)
        else:
            beside = work.forward + forward + sent, work.backward + backward + returned
            gathers = _gather_s(job, wires, groups, elements, max(1, count), beside, software)
        stages.append(StageSeconds(work, forward, backward, *gathers, sent, returned))
    return stages


def _pace(timed: StageCompute, predicted: Work) -> Pace:
    """A measured stage over a predicted one; a backward that was not measured in halves has the predicted halves."""
    weights = timed.weights
    if weights is None:
        weights = timed.backward * predicted.weight_matmul / predicted.backward if predicted.backward else 0.0
    found = timed.forward, timed.backward - weights, weights
    expected = predicted.forward, predicted.input, predicted.weight_matmul
    # A stage without layers has nothing in some of them.
    forward, inputs, later = (own / its if its else 0.0 for own, its in zip(found, expected, strict=True))
    return forward, inputs, later


def _block(
    job: Job,
    device: Device,
    wide: Device,
    software: Software,
    wires: Wires,
    groups: Groups,
    mode: str,
    pace: Pace | None,
) -> StageSeconds:
    """One block as a stage of its own, without what is gathered for it; `pace` is that of a measured stage."""
    work = block_work(job, device, software, mode)
    if pace is not None:
        work = work.scaled(*pace)
    forward, backward = shared_s(job, device, software, wires, groups, mode, work, merges=pace is None)
    sent, returned = transfers_s(job, wires, groups.experts, software, mode, (work.forward, work.backward))
    if pace is not None:
        return StageSeconds(work, forward, backward, 0.0, 0.0, sent, returned)
    if device.operations is not None:  # a CPU is its own host
        waits = block_calls_s(job.model.positions, wide, software, mode)
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
    job: Job,
    device: Device,
    software: Software,
    wires: Wires,
    groups: Groups,
    mode: str,
    work: Work,
    *,
    merges: bool = True,
) -> tuple[float, float]:
    """What tensor and context parallelism add to a block's forward and backward: transfers, as far as its `work` does
    not hide them, and what is merged, unless that is part of its work."""
    layout, tokens = job.layout, tokens_of(job)
    size = job.precision.number_bytes * tokens * job.model.width
    # An all-reduce is a reduce-scatter and an all-gather: with sequence parallelism the two are apart, not more.
    once = 2 * all_reduce_s(wires, groups.tp, size)
    forward, backward, repeated = once, once, once if mode in REPEATED else 0.0
    if software.own and (mode == "selective" or (mode == "full" and software.fusion == "eager")):
        repeated = (0.75 if layout.sp else 0.5) * once  # selective keeps no sums either; a block's last is not needed
    if mode == "selective" and software.selective == "half" and layout.sp:
        repeated = once / 2  # what is scattered is kept, and gathered again
    pieces = software.tensor_overlap and (groups.tp.nodes == 1 or not software.own)  # ours are for GPUs of one node
    if pieces:
        whole = (
            0.5 if software.own and job.model.linear_bias else 0.0
        )  # torch does not cut a sum to which a bias is added
        forward = _piecewise((1 - whole) * forward, work.forward_matmul, layout.tp) + whole * forward
        backward = _piecewise(backward, work.input_matmul, layout.tp)
        repeated = _piecewise((1 - whole) * repeated, work.forward_matmul, layout.tp) + whole * repeated
    if layout.sp and software.regather:
        # What was scattered is gathered again for the weights' gradients while those of the inputs are computed.
        again = 2 * all_gather_s(wires, groups.tp, size)
        share = _COPIED if pieces else CONTENTION
        backward += max(0.0, again - work.input_matmul) + share * min(again, work.input_matmul)
    backward += repeated
    attention = work.forward_attention, work.backward_attention
    ahead, back = context_s(job, wires, groups.cp, attention, CONTENTION)
    if merges:
        ahead, back = (moved + merged for moved, merged in zip((ahead, back), merged_s(job, device), strict=True))
    return forward + ahead, backward + back + (ahead if mode in REPEATED else 0.0)


def _ends_s(
    job: Job, wires: Wires, groups: Groups, software: Software, *, first: bool, last: bool
) -> tuple[float, float]:
    """What tensor parallelism adds to our embedding and head: a sum over the embedding's slices of the vocabulary, and
    one over the gradients that the head's slices give its input."""
    if not software.own:
        return 0.0, 0.0
    once = all_reduce_s(wires, groups.tp, job.precision.number_bytes * tokens_of(job) * job.model.width)
    further = last * job.model.extra_tokens  # each a lookup and a pass through the head
    looked_up, heads = first + further, last + further
    if job.layout.sp:  # scattered on one way, gathered on the other
        return (looked_up + heads) * once / 2, (looked_up + heads) * once / 2
    return looked_up * once, heads * once


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
    if not reduces_every_micro_batch(job) or groups.shard.size == 1:
        return 0.0, 0.0
    wide, parts, host = wire_bytes(job, software), layers, 0.0
    if software.gathers == "weight":
        parts = layers * len(list(products_of(job, software)))
        host = parts * groups.shard.size * _LISTED_LAUNCHES * USUAL_LAUNCH_S
    gather = scatter = host
    frozen = layer_frozen(job).shared * layers if job.layout.zero_stage == 3 else 0.0
    sent = gathered_bytes(job, software, elements, layers)
    for size, (count, shard, _) in zip(sent, shared_parts(elements, groups), strict=False):
        gather += all_gather_s(wires, shard, (size + frozen) / parts) * parts
        scatter += reduce_scatter_s(wires, shard, wide * count / parts) * parts
        # Replicas of ours sum up what a step has scattered; with other programs it is each micro-batch.
        reduces = parts / job.accumulation if software.own else parts
        scatter += all_reduce_s(wires, groups.replicate, wide * count / parts / shard.size) * reduces
    gathers_forward = gather if job.layout.zero_stage == 3 or job.accumulation == 1 else gather / job.accumulation
    again = gather if job.layout.zero_stage == 3 else 0.0
    if software.gathers == "weight" and job.memory.recompute == "full":
        again *= 2
    ahead = job.layout.prefetch > 0  # else every block waits for its own parameters
    forward = hidden_s(gathers_forward, beside[0], layers, ahead and software.parameter_overlap)
    exposed = scatter + (again if ahead else 0.0)
    backward = hidden_s(exposed, beside[1], layers, software.gradient_overlap)
    return forward, backward + (0.0 if ahead else again)


def shared_parts(elements: Elements, groups: Groups) -> Iterator[tuple[float, Group, Group]]:
    """Parameters with who shares their states and who holds the same: experts, and all others."""
    yield elements.plain, groups.shard, groups.data
    if elements.experts:
        yield elements.experts, groups.expert_shard, groups.expert_data


def _shared_s(job: Job, sharing: Sharing, layers: int, ends: bool, parameters: float) -> tuple[float, float]:
    """What a CPU's ranks measured together, of a micro-batch: what happens once a step is divided by its
    micro-batches."""
    forward, backward = sharing.seconds(layers, ends, parameters)
    gathers = 1 if job.layout.zero_stage == 3 else job.accumulation
    reduces = 1 if reduces_every_micro_batch(job) else job.accumulation
    return forward / gathers, backward / reduces


def reduces_every_micro_batch(job: Job) -> bool:
    """Under a pipeline gradients stay whole until the step's end, but for those of parameters that are sharded too."""
    return job.layout.zero_stage == 3 or (job.layout.zero_stage == 2 and job.layout.pp == 1)


def gathered_bytes(job: Job, software: Software, elements: Elements, layers: int) -> tuple[float, float]:
    """Bytes of some layers' parameters while they are gathered: of all but experts, whose products' weights may be
    narrower, and of experts."""
    each = job.precision.number_bytes
    fp8 = software.own and gathers_fp8(job)
    narrow = layers * sum(columns * inner for _, columns, inner in products_of(job, software)) if fp8 else 0
    return each * elements.plain - (each - 1) * narrow, each * elements.experts


def wire_bytes(job: Job, software: Software) -> int:
    """Bytes of a gradient while it is reduced."""
    return software.reduced_bytes or job.precision.gradient_bytes


def hidden_s(transfers: float, compute: float, layers: int, overlaps: bool) -> float:
    """What transfers add to the compute they overlap: the first of them, what compute cannot hide, and its slowdown."""
    if not overlaps:
        return transfers
    return max(transfers / layers, transfers - compute) + CONTENTION * min(transfers, compute)


def boundary_s(job: Job, software: Software, wires: Wires, groups: Groups) -> float:
    """Bytes sent from one stage to the next."""
    size = job.precision.number_bytes * tokens_of(job) * job.model.width
    within = groups.stages_share_node
    if job.layout.tp > 1 and (software.scatter_sends or job.layout.sp):
        send = send_s(wires, size / job.layout.tp, within_node=within)
        return send + (0.0 if job.layout.sp else all_gather_s(wires, groups.tp, size))
    # Copies of the same values leave every tensor-parallel rank over its own share of the network.
    return send_s(wires, size, within_node=within)
