"""What a mixture of experts adds to a block: grouped products, rows moved about, and their way to the experts' ranks.

T tokens of a micro-batch that this rank routes, R rows: a token once for each of its experts, N experts of which this
rank holds M, D width, F an expert's inner width.
"""

from functools import lru_cache
from math import ceil

from meshwright.cost import REPEATED
from meshwright.job import Job, Model
from meshwright.job.experts import Experts
from meshwright.plan.communication import CONTENTION, Group, Wires
from meshwright.plan.kernels import Device, matmul_s, memory_s
from meshwright.plan.software import Software

IMBALANCE = 1.15
"""Rows of the fullest rank over those of the mean, where a router has learned to balance: every rank waits for it."""
ROUTED = {"moe.rows", "moe.gate_up", "moe.activated", "moe.product", "moe.out"}
"""What a block saves of every row."""
_TILE = 128
"""Rows of a tile: the last one of every expert is half empty on average."""
_SCORED_PASSES = (14, 10)
"""Passes over the router's results in 32 bits, forward and backward: softmax, sort, counts, and their gradients."""


def without_experts(job: Job) -> Job:
    """The job as its layers without experts are."""
    return job if job.model.experts is None else job.model_copy(update={"model": _dense(job.model)})


@lru_cache(maxsize=256)
def _dense(model: Model) -> Model:
    return model.model_copy(update={"experts": None})


def imbalance(job: Job) -> float:
    """How many times the mean number of rows the fullest rank computes."""
    experts = job.model.experts
    return 1.0 if experts is None or experts.force_balance or job.layout.ep == 1 else IMBALANCE


def expert_guess(job: Job, software: Software) -> str:
    """What is assumed of a mixture, in words for an answer."""
    load = imbalance(job)
    even = "equally loaded" if load == 1.0 else f"such that the fullest rank has {load:g} times the mean's rows"
    even = "all on every rank" if job.layout.ep == 1 else even
    seen = "one H200 reached with OLMoE's shape" if software.own else "published runs of other programs have it"
    return (
        f"experts: {even}, their products at {software.grouped:.0%} of the rate of one product of that size, as {seen}"
    )


def routed_tokens(job: Job) -> float:
    """Tokens of a micro-batch that one rank routes: tensor-parallel ranks have different ones."""
    layout = job.layout
    return job.batch.micro_batch * job.batch.sequence_length / (layout.cp * layout.tp)


def rows_of(job: Job) -> float:
    """Rows that the fullest rank's experts compute."""
    experts = job.model.experts
    return 0.0 if experts is None else routed_tokens(job) * experts.top_k * imbalance(job)


def grouped_products(job: Job) -> tuple[tuple[int, int], ...]:
    """Columns and inner size of the experts' products: gate and up at once, and down."""
    width, experts = job.model.width, job.model.experts
    return () if experts is None else ((2 * experts.ffn_width, width), (width, experts.ffn_width))


def expert_casts(job: Job) -> list[tuple[int, int, int]]:
    """The experts' products as if they were one each: rows, columns and inner size."""
    return [(ceil(rows_of(job)), columns, inner) for columns, inner in grouped_products(job)]


def products_s(job: Job, device: Device, software: Software) -> tuple[float, float, float]:
    """The experts' products: forward, gradients of rows and of weights."""
    experts = job.model.experts
    if experts is None:
        return 0.0, 0.0, 0.0
    held, rows = experts.count // job.layout.ep, rows_of(job)
    forward = back = weights = 0.0
    padded = ceil(rows + held * _TILE / 2)
    for columns, inner in grouped_products(job):
        # Every expert's weights are read, however few its rows are.
        moved = memory_s(device, job.precision.number_bytes * held * columns * inner)
        forward += max(matmul_s(device, padded, columns, inner), moved)
        back += max(matmul_s(device, padded, inner, columns, kind="input"), moved)
        # One expert's gradient after the other: as tall a product as all of them, as deep as one expert has rows.
        weights += matmul_s(device, held * columns, inner, max(1, ceil(rows / held)), kind="weight")
    return tuple(seconds / software.grouped for seconds in (forward, back, weights))  # type: ignore[return-value]


def moved_s(job: Job, device: Device, software: Software) -> tuple[float, float]:
    """Scores, rows gathered, gated, put back and summed, forward and backward; and sorted again where they arrive."""
    experts = job.model.experts
    if experts is None:
        return 0.0, 0.0
    each, tokens, rows = job.precision.number_bytes, routed_tokens(job), rows_of(job)
    stream, wide = each * tokens * job.model.width, each * rows * job.model.width
    inner = 0.0 if software.fused_experts else each * rows * experts.ffn_width
    scores = 4.0 * tokens * experts.count
    # Gathered: tokens read and rows written. Gated: two read and one written. Summed: rows read, tokens written.
    forward = 2 * stream + 2 * wide + 3 * inner + _SCORED_PASSES[0] * scores
    backward = 2 * stream + 3 * wide + 5 * inner + _SCORED_PASSES[1] * scores
    if software.fusion == "eager":  # the weighted sum is three operations, a gate two
        forward += 3 * wide + 2 * inner
        backward += 5 * wide + 4 * inner
    if job.model.linear_bias:  # added by themselves, and summed over rows for their gradients
        forward += 4 * inner + 2 * wide
        backward += 2 * inner + wide
    if job.layout.ep > 1 and not software.sorts_in_transit:  # by expert after they arrive, by rank before they return
        forward += 4 * wide
        backward += 4 * wide
    kernels = 30 if software.fusion == "eager" else 16
    return memory_s(device, forward, kernels), memory_s(device, backward, kernels)


def dispatch_s(job: Job, wires: Wires, group: Group, software: Software) -> float:
    """Rows on their way to their experts, or back: once over the links of a rank."""
    experts, ranks = job.model.experts, group.size
    if experts is None or ranks == 1:
        return 0.0
    sent = job.precision.number_bytes * routed_tokens(job) * job.model.width * imbalance(job)
    within, between = _copies(experts, group, software)
    latency = wires.start_s + (wires.node_latency_s if group.nodes == 1 else wires.network_latency_s) * 2
    # Both kinds of links work at once.
    return latency + max(sent * within / wires.node_bytes_per_s, sent * between / wires.network_bytes_per_s)


def _copies(experts: Experts, group: Group, software: Software) -> tuple[float, float]:
    """How often a token crosses the links inside a node, and the network, on average.

    Each of its rows by itself; or, where the program sends a token once to every rank and over the network once to
    every node, as often as it has different destinations.
    """
    ranks, nodes, top_k = group.size, group.nodes, experts.top_k
    elsewhere = 1 - 1 / nodes
    if not software.sends_once:
        return top_k * (group.per_node - 1) / ranks, top_k * elsewhere
    to_nodes = (nodes - 1) * (1 - elsewhere**top_k) if nodes > 1 else 0.0
    to_ranks = ranks * (1 - (1 - 1 / ranks) ** top_k) * (1 - 1 / group.per_node)
    return to_ranks, to_nodes


def transfers_s(
    job: Job, wires: Wires, group: Group, software: Software, mode: str, compute: tuple[float, float]
) -> tuple[float, float]:
    """What rows on their way add to the forward and backward of a block: they go and come back, and so do their
    gradients, beside so many seconds of `compute` where the program does both at once."""
    once = 2 * dispatch_s(job, wires, group, software)
    moved = once, once + (once if mode in REPEATED else 0.0)
    if not software.expert_overlap:
        return moved
    forward, backward = (
        max(0.0, transfer - beside) + CONTENTION * min(transfer, beside)
        for transfer, beside in zip(moved, compute, strict=True)
    )
    return forward, backward
