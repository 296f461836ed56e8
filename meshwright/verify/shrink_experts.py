"""Small experts, small expert parallelism and small latent attention of the same kind as a job's."""

from math import gcd
from typing import Any

from meshwright.job import Job, Latent
from meshwright.job.devices import Layout
from meshwright.job.experts import Experts

DROPPING = 0.5
"""A capacity at which tokens are dropped however they are routed: all experts together take about half of them."""


def small_ep(layout: Layout, degrees: dict[str, int]) -> int:
    """A degree of expert parallelism for fewer ranks: all of those that share experts if it was, else some of them."""
    if layout.ep == 1:
        return 1
    ranks = degrees["tp"] * (degrees["dp_shard"] * degrees["cp"] if layout.zero_stage else 1)
    before = layout.tp * (layout.dp_shard * layout.cp if layout.zero_stage else 1)
    some = [degree for degree in range(1, ranks + 1) if ranks % degree == 0 and degree <= layout.ep]
    alike = [degree for degree in some if degree > 1 and (degree < ranks) == (layout.ep < before)]
    return max(alike or some)


def small_experts(job: Job, layout: Layout, layers: int) -> dict[str, Any] | None:
    """A few experts with the same routing: one or several on a rank, one or several of them for a token."""
    experts = job.model.experts
    if experts is None:
        return None
    several = experts.count > job.layout.ep or layout.ep < 4  # of two experts a token would use both
    count = layout.ep * (max(2, 4 // gcd(4, layout.ep)) if several else 1)
    groups, kept = _small_groups(experts, count)
    fits = kept * count // groups
    return experts.model_dump() | {
        "count": count,
        "top_k": count if experts.top_k == experts.count else min(fits, 2, experts.top_k),
        "ffn_width": 10,
        "shared_width": 6 * layout.tp if experts.shared_width else 0,
        "first_dense": min(experts.first_dense, 1, layers - 1),
        "groups": groups,
        "groups_kept": kept,
        "force_balance": False,
        "capacity": None if experts.capacity is None else min(experts.capacity, DROPPING),
    }


def _small_groups(experts: Experts, count: int) -> tuple[int, int]:
    """How many groups so few experts have, and how many of them a token may use: groups of one expert stay such."""
    if experts.groups == experts.count > 1:
        groups, some = count, max(1, min(experts.top_k, count - 1))
    else:
        groups, some = 2 if experts.groups > 1 and count % 4 == 0 else 1, 1
    return groups, some if experts.groups_kept < experts.groups else groups


def small_latent(latent: Latent | None, head_dim: int, same_values: bool) -> dict[str, Any] | None:
    """Vectors of a few numbers; values are narrower than keys if they were."""
    if latent is None:
        return None
    return {
        "kv_rank": 9,
        "q_rank": None if latent.q_rank is None else 7,
        "rope_dim": head_dim // 2,
        "value_dim": head_dim if same_values else head_dim - 1,
    }


def words(experts: Experts, small: dict[str, Any]) -> str:
    """What became of the experts, in words."""
    capacity = "" if experts.capacity is None else f", capacity {experts.capacity:g} → {small['capacity']:g}"
    return f"{experts.top_k} of {experts.count} experts → {small['top_k']} of {small['count']}{capacity}"
