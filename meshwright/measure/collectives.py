"""How long collectives take between these ranks, by kind, group and size."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from meshwright.hardware.profile import Collective, CollectiveKind
from meshwright.parallel.world import all_gather

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SIZES = tuple(2**power for power in (12, 16, 20, 22, 24, 26, 28))
_REPEATS = 7
_LIMIT_S = 25.0


def collectives(
    device: torch.device, nodes_of: Callable[[list[int]], int], sizes: tuple[int, ...] = SIZES
) -> list[Collective]:
    """Measure every kind over groups of 2, 4, … and all ranks; all ranks call this, and rank 0's medians count."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = sorted({2**power for power in range(1, size.bit_length()) if 2**power <= size} | {size})
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    found: list[Collective] = []
    for count, group in groups.items():
        if rank < count:
            nodes = nodes_of(list(range(count)))
            for kind, length, seconds in _group(device, group, count, sizes):
                found.append(Collective(kind=kind, ranks=count, nodes=nodes, size_bytes=length, seconds=seconds))
        dist.barrier()
    return found


def _group(
    device: torch.device, group: dist.ProcessGroup, count: int, sizes: tuple[int, ...]
) -> Iterator[tuple[CollectiveKind, int, float]]:
    began = time.perf_counter()
    for length in sizes:
        entries = max(count, length // 4 // count * count)
        whole = torch.ones(entries, device=device)
        other, piece = torch.empty_like(whole), torch.empty(entries // count, device=device)
        calls: dict[CollectiveKind, Callable[[], object]] = {
            "all-reduce": partial(dist.all_reduce, whole, group=group),
            "all-gather": partial(all_gather, whole, piece, group=group),
            "reduce-scatter": partial(reduce_scatter, piece, whole, group=group),
            "all-to-all": partial(dist.all_to_all_single, other, whole, group=group),
            "send": partial(_exchange, whole, other, group),
        }
        for kind, call in calls.items():
            seconds = _median_s(call, device, group)
            if seconds is not None:
                yield kind, entries * 4, seconds
        # All ranks must agree on when to stop, so rank 0 of the group decides.
        stop = torch.tensor([float(time.perf_counter() - began > _LIMIT_S / 2)], device=device)
        dist.broadcast(stop, 0, group=group)
        if stop.item():
            return


def _exchange(whole: torch.Tensor, other: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Pairs of neighbours send each other everything at once."""
    neighbour = group.rank() ^ 1
    if neighbour < group.size():
        there, back = dist.P2POp(dist.isend, whole, neighbour, group), dist.P2POp(dist.irecv, other, neighbour, group)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()


def _median_s(call: Callable[[], object], device: torch.device, group: dist.ProcessGroup) -> float | None:
    """Median seconds of one call that all members make together; None if the backend lacks the collective."""
    try:
        call()
    except RuntimeError:
        return None
    times = []
    for _ in range(_REPEATS):
        dist.barrier(group=group)
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
