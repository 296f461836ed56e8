"""How much memory a run uses: at peak, and between steps."""

import os
import resource
import sys
from pathlib import Path

import torch


class MemoryUsage:
    """Reads the device's memory after every step: allocated by torch on a GPU, resident in the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most_in_first_step = 0
        self.peak: int | None = None
        """The peak since the end of the first step, which compiles and has no optimizer states yet."""
        self.steady: int | None = None
        """Memory after the last step's gradients were freed; None if the system does not report it."""

    def after_step(self, step: int) -> int:
        """Read the memory; returns the peak so far."""
        if self._device.type == "cuda":
            # Read once and as it is: torch's shorter calls each put all counters in order, a tenth of a millisecond in
            # which a small model's GPU has nothing to do.
            allocated = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
            self.peak, self.steady = allocated["peak"], allocated["current"]
            most = max(self._most_in_first_step, self.peak)
            if step == 1:
                self._most_in_first_step = most
                torch.cuda.reset_peak_memory_stats(self._device)
            return most
        self.steady = resident_bytes()
        # The kernel counts the peak in batches of pages, and may lag behind.
        self.peak = max(_resident_peak_bytes(), self.steady or 0)
        return self.peak


def _resident_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """Memory of this process now; None if the system does not report it."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else None
