"""Time calls on a device: with CUDA events on a GPU, with the clock on a CPU; medians over groups of calls."""

import statistics
import time
from collections.abc import Callable

import torch

from meshwright.measure.together import Together

GROUPS = 5
_MOST_CALLS = 2000


class Stopwatch:
    """Times calls on one device until a deadline."""

    def __init__(self, device: torch.device, goal_s: float, together: Together | None = None) -> None:
        self.device = device
        self.together = together or Together()
        """Ranks that make the same calls at the same time."""
        self.goal_s = goal_s
        """Seconds spent on one measurement."""

    def median_s(self, call: Callable[[int], object]) -> float:
        """Median seconds of one call, on the slowest of the ranks that measure together.

        `call` gets a running number, to use different memory each time.
        """
        call(0)
        once = self.together.most(self._span(call, 1))
        calls = max(1, min(_MOST_CALLS, int(self.goal_s / GROUPS / max(once, 1e-7))))
        taken = []
        for _ in range(GROUPS if once * GROUPS < 4 * self.goal_s else 2):
            self.together.most()
            taken.append(self._span(call, calls))
        return self.together.most(statistics.median(taken)) / calls

    def busy(self, call: Callable[[int], object], seconds: float) -> None:
        """Keep the device busy for a while, so that its clock and power are those of long runs."""
        began, number = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(10):
                call(number)
                number += 1
            self.wait()

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _span(self, call: Callable[[int], object], calls: int) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            for number in range(calls):
                call(number)
            return time.perf_counter() - began
        self.wait()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for number in range(calls):
            call(number)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
