"""A short test of every axis of the mesh before the first step: which link is slow or, by its phase, broken."""

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel import World
from meshwright.train.activity import Activity
from meshwright.train.recorder import Progress, Recorder

BYTES, TRIES = 1 << 18, 4
"""Bytes of a message, and how often it is sent: the first opens connections, and the minimum time counts."""
SLOW, LEAST_S = 3.0, 1e-3
"""A group of ranks is slow from this many times the median of its axis on, if the difference matters."""


def try_links(world: World, recorder: Recorder, progress: Progress, activity: Activity) -> None:
    """Time an all-reduce over every axis; rank 0 records it. If one hangs, the watchdog names it by its phase."""
    if world.size == 1:
        return
    groups = axis_groups(world)
    own = {}
    for axis, group in groups.items():
        ranks = dist.get_process_group_ranks(group)
        activity.at(f"testing the link of axis {axis} between ranks {', '.join(map(str, ranks))}")
        own[axis] = _least_s(lambda message, group=group: dist.all_reduce(message, group=group), world.device)
    first = {axis: min(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    activity.at("comparing the links")
    slots = [seconds * (rank == world.rank) for seconds in own.values() for rank in range(world.size)]
    leaders = [float(first[axis] * (rank == world.rank)) for axis in own for rank in range(world.size)]
    sums = world.sum_over_world([*slots, *leaders])
    times = {
        axis: {
            rank: (int(sums[(len(own) + place) * world.size + rank]), sums[place * world.size + rank])
            for rank in range(world.size)
        }
        for place, axis in enumerate(own)
    }
    slow = [clause for axis, found in times.items() for clause in slow_groups(axis, found)]
    axes: dict[str, Any] = {
        axis: {"median_ms": round(1e3 * median(s for _, s in found.values()), 3), "bytes": BYTES}
        for axis, found in times.items()
    }
    recorder.event("links", axes=axes, slow=slow)
    for clause in slow:
        progress.message(f"warning: {clause}")


def axis_groups(world: World) -> dict[str, dist.ProcessGroup]:
    """This rank's group along every axis of the mesh that has more than one rank, and the ranks of its sequences."""
    groups: dict[str, dist.ProcessGroup] = {}
    if world.mesh is not None:
        for name in world.mesh.mesh_dim_names or ():
            if world.mesh[name].size() > 1:
                groups[name] = world.mesh.get_group(name)
    if world.context_group is not None:
        groups["cp"] = world.context_group
    return groups


def slow_groups(axis: str, found: dict[int, tuple[int, float]]) -> list[str]:
    """A clause for every group, given as rank → (the group's first rank, seconds), that is much slower than most."""
    seconds: dict[int, float] = {}
    members: dict[int, list[int]] = {}
    for rank, (leader, taken) in found.items():
        seconds[leader] = max(seconds.get(leader, 0.0), taken)
        members.setdefault(leader, []).append(rank)
    report = []
    for leader, taken in seconds.items():
        others = [value for other, value in seconds.items() if other != leader]
        if others and taken > SLOW * median(others) and taken - median(others) > LEAST_S:
            ranks = ", ".join(map(str, members[leader]))
            report.append(
                f"the link between ranks {ranks} (axis {axis}) takes {1e3 * taken:.1f} ms for {BYTES // 1024} KiB, "
                f"others {1e3 * median(others):.1f} ms"
            )
    return report


def _least_s(send: Any, device: torch.device) -> float:
    message = torch.zeros(BYTES // 4, device=device)
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        send(message)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
