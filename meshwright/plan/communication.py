"""Communication between ranks: how long a collective takes over the links it crosses.

Rings and trees as NCCL builds them: inside a node every GPU sends at its links' rate; between nodes each GPU has its
share of the node's network, and a collective over both is bounded by the slower of the two.
"""

from dataclasses import dataclass
from math import ceil, log2

_TREE = 0.85
"""Fraction of a ring's bandwidth that trees reach."""
CONTENTION = 0.189
"""What compute loses while a collective runs beside it and takes multiprocessors and memory bandwidth: the mean over
training on A100, H100 and AMD's cards (arXiv:2507.03114)."""


@dataclass(frozen=True)
class Wires:
    """The links of a machine, per GPU and in one direction, as collectives reach them."""

    gpus_per_node: int
    node_bytes_per_s: float
    """To the other GPUs of the node."""
    node_latency_s: float
    network_bytes_per_s: float
    """This GPU's share of the node's network."""
    network_latency_s: float
    start_s: float = 0.0
    """From the call of a collective to its first hop."""
    scatter: float = 1.0
    """How many times as long as an all-gather a reduce-scatter takes, where it is no ring."""


@dataclass(frozen=True)
class Group:
    """Ranks that share a collective: how many, and how many of them are in each node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes the group spans."""
        return ceil(self.size / self.per_node)


def group_of(size: int, stride: int, gpus_per_node: int) -> Group:
    """A group of ranks `stride` apart."""
    return Group(size, max(1, min(size, gpus_per_node // stride)) if stride < gpus_per_node else 1)


def all_reduce_s(wires: Wires, group: Group, size_bytes: float) -> float:
    """Every rank ends with the sum over all ranks: a ring twice around, or a tree between the nodes if that is
    faster."""
    ring = _ring_s(wires, group, size_bytes, rounds=2)
    if group.nodes == 1 or not ring:
        return ring
    share = 2 * size_bytes * (group.size - 1) / group.size
    # up the tree and down again, along a chain inside each node
    hops = 2 * (ceil(log2(group.nodes)) * wires.network_latency_s + (group.per_node - 1) * wires.node_latency_s)
    return min(ring, wires.start_s + hops + share / (_TREE * _bandwidth(wires, group)))


def all_gather_s(wires: Wires, group: Group, size_bytes: float) -> float:
    """Every rank ends with all shards, size_bytes together. Only rings do this."""
    return _ring_s(wires, group, size_bytes, rounds=1)


def reduce_scatter_s(wires: Wires, group: Group, size_bytes: float) -> float:
    """Every rank ends with its shard of the sum of what all had, size_bytes each: by rings as long as an all-gather."""
    return wires.scatter * _ring_s(wires, group, size_bytes, rounds=1)


def broadcast_s(wires: Wires, group: Group, size_bytes: float) -> float:
    """One rank's bytes reach all others along a ring, in pieces that follow each other; a reduction to one rank takes
    as long."""
    if group.size == 1 or size_bytes == 0:
        return 0.0
    return _latency_s(wires, group, rounds=1) + size_bytes / _bandwidth(wires, group)


def all_to_all_s(wires: Wires, group: Group, size_bytes: float) -> float:
    """Every rank sends each other one its part of size_bytes, over its own links."""
    if group.size == 1 or size_bytes == 0:
        return 0.0
    bandwidth = wires.node_bytes_per_s if group.nodes == 1 else wires.network_bytes_per_s
    return _latency_s(wires, group, rounds=1) + (group.size - 1) / group.size * size_bytes / bandwidth


def send_s(wires: Wires, size_bytes: float, *, within_node: bool) -> float:
    """One rank to another."""
    if within_node:
        return wires.node_latency_s * 3 + size_bytes / wires.node_bytes_per_s
    return wires.network_latency_s * 2 + size_bytes / wires.network_bytes_per_s


def _ring_s(wires: Wires, group: Group, size_bytes: float, rounds: int) -> float:
    """Every rank passes its chunk on, once for each other rank."""
    if group.size == 1 or size_bytes == 0:
        return 0.0
    carried = rounds * (group.size - 1) / group.size * size_bytes
    return _latency_s(wires, group, rounds) + carried / _bandwidth(wires, group)


def _latency_s(wires: Wires, group: Group, rounds: int) -> float:
    """What NCCL's own tables add up for a ring: it leaves each node once a round, its other hops stay inside one."""
    between = group.nodes - 1
    within = group.size - 1 - between
    return wires.start_s + rounds * (within * wires.node_latency_s + between * wires.network_latency_s)


def _bandwidth(wires: Wires, group: Group) -> float:
    """A ring enters and leaves each node once, so the network cards of its members in the node share it."""
    if group.nodes == 1:
        return wires.node_bytes_per_s
    network = wires.network_bytes_per_s * group.per_node
    return min(network, wires.node_bytes_per_s) if group.per_node > 1 else network


def passed_on(kind: str, ranks: int, size_bytes: float) -> float:
    """Bytes that one rank passes on in a collective of torch's `kind`: its time over links of one byte a second."""
    wires, group = Wires(ranks, 1.0, 0.0, 1.0, 0.0), Group(ranks, ranks)
    if kind in _BY_KIND:
        return _BY_KIND[kind](wires, group, size_bytes)
    return send_s(wires, size_bytes, within_node=True)


_BY_KIND = {
    "all_gather": all_gather_s,
    "all_reduce": all_reduce_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
    "broadcast": broadcast_s,
    "reduce": broadcast_s,
}
