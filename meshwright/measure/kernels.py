"""Which kernels (on a CPU, operations) take a step's time."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.torch_private.processes import is_cuda_event

TOP = 40
KINDS = {
    "communication": ("nccl", "gloo:", "c10d::"),
    "attention": ("attention", "flash", "fmha", "cudnn_generated", "sdpa"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "addmm", "aten::mm", "aten::bmm", "_scaled_mm", "matmul"),
    "copies": ("memcpy", "memset", "copy_", "copy"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
}
"""Substrings of names, the first matching kind wins; the rest is `other`: mostly fused element-wise work."""
RANGES = ("Optimizer.", "FSDP::", "PP:")
"""Torch's names for parts of a step, which the profiler also puts on the device's timeline, around their kernels."""


@dataclass(frozen=True)
class Kernel:
    """One kernel's share of a step."""

    name: str
    kind: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class KernelTimes:
    """A step's device time by kernel; on a CPU by operation, each without those it calls."""

    kinds_s: dict[str, float]
    top: list[Kernel]


class Kernels:
    """Torch's profiler around some steps."""

    times: KernelTimes | None = None

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._profile: Any = None

    def begin(self) -> None:
        """Start profiling."""
        activities = [ProfilerActivity.CUDA] if self._cuda else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *activities])
        self._profile.start()

    def end(self, steps: int) -> None:
        """Stop, and keep the times per step."""
        self._profile.stop()
        kernels = []
        for event in self._profile.key_averages():
            if self._cuda and (not is_cuda_event(event) or event.key.startswith(RANGES)):
                continue
            microseconds = event.self_device_time_total if self._cuda else event.self_cpu_time_total
            if microseconds > 0:
                kernels.append(Kernel(event.key, kind_of(event.key), event.count / steps, microseconds / 1e6 / steps))
        kernels.sort(key=lambda kernel: -kernel.seconds)
        kinds = dict.fromkeys((*KINDS, "other"), 0.0)
        for kernel in kernels:
            kinds[kernel.kind] += kernel.seconds
        self.times = KernelTimes(kinds, kernels[:TOP])


def kind_of(name: str) -> str:
    """The kind of a kernel, by name; a fused kernel is named after all it contains, which is never a product."""
    lowered = name.lower()
    if lowered.startswith("triton_"):
        return "other"
    return next((kind for kind, parts in KINDS.items() if any(part in lowered for part in parts)), "other")
