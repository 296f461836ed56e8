"""Which rank keeps the others waiting.

All ranks finish a step together, so its duration says nothing. What counts is how long a rank itself was busy: on a CPU
the time its main thread ran or waited for a core, as counted by Linux; on a GPU the time of a fixed computation. The
time the rank waited for its data is reported too.
"""

import threading
import time
from pathlib import Path
from statistics import median_low

import torch

from meshwright.parallel import World

FIRST_LOOK, EVERY = 20, 200
"""Steps of an attempt after which the ranks are compared: once early, then at this interval."""
SLOW, LEAST_S = 1.5, 2e-3
"""A rank is slow from this many times the median of all on, if the difference matters."""
_PROBE_WIDTH, _PROBES = 2048, 5


class Stragglers:
    """One rank's own times since the last comparison."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ran_s = _ran_s()
        self._waited_s, self._steps = 0.0, 0

    def step(self, data_wait_s: float) -> None:
        """Count a step."""
        self._waited_s += data_wait_s
        self._steps += 1

    def due(self, made: int) -> bool:
        """Whether the ranks are compared after this many steps of the attempt."""
        return self._world.size > 1 and (made == FIRST_LOOK or made % EVERY == 0)

    def compare(self) -> dict[str, list[float]]:
        """Every rank's seconds per step, by kind: busy, and waiting for data; all ranks call this together."""
        world, steps = self._world, max(1, self._steps)
        ran_s = _ran_s()
        busy_s = _probe_s(world.device) if world.device.type == "cuda" else (ran_s - self._ran_s) / steps
        own = {"work_s": busy_s, "data_wait_s": self._waited_s / steps}
        self._ran_s, self._waited_s, self._steps = ran_s, 0.0, 0
        slots = [value * (rank == world.rank) for value in own.values() for rank in range(world.size)]
        sums = world.sum_over_world(slots)
        return {kind: sums[place * world.size : (place + 1) * world.size] for place, kind in enumerate(own)}


def slow_ranks(times: dict[str, list[float]]) -> list[str]:
    """A clause for every rank that is much slower than most."""
    report = []
    for kind, name in (("work_s", "works"), ("data_wait_s", "waits for data")):
        usual = median_low(times[kind])  # with two ranks, the faster one
        for rank, seconds in enumerate(times[kind]):
            if seconds > SLOW * usual and seconds - usual > LEAST_S:
                report.append(f"rank {rank} {name} {1000 * seconds:.1f} ms per step, others {1000 * usual:.1f} ms")
    return report


def _ran_s() -> float:
    """How long the main thread ran or waited for a core; only its CPU time if the system reports no more."""
    line = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat")
    if line.is_file():
        ran, stood_in_line, _ = line.read_text().split()
        return (int(ran) + int(stood_in_line)) / 1e9
    return time.thread_time()


def _probe_s(device: torch.device) -> float:
    """The minimum time of a fixed product."""
    matrix = torch.ones(_PROBE_WIDTH, _PROBE_WIDTH, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(_PROBES):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        matrix @ matrix
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
