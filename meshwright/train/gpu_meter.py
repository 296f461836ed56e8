"""A GPU's own counters: utilisation, power, memory and clock, read in the background from time to time."""

import shutil
import subprocess
import threading
from contextlib import suppress

import torch

INTERVAL_S = 5.0
_QUERY = "utilization.gpu,power.draw,memory.used,clocks.sm"


class GpuMeter:
    """The last reading of a rank's GPU; empty on a CPU and if no library or tool can read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended = threading.Event()
        self.reading: dict[str, float] = {}
        """gpu_utilisation (0 to 1), gpu_power_w, gpu_memory_bytes (of all programs), gpu_clock_mhz."""

    def __enter__(self) -> "GpuMeter":
        if self._device.type == "cuda":
            threading.Thread(target=self._run, name="gpu meter", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        while True:
            self.reading = _read(self._device)
            if not self.reading or self._ended.wait(INTERVAL_S):
                return


def _read(device: torch.device) -> dict[str, float]:
    """Through NVML or ROCm's library if torch finds one, else through nvidia-smi."""
    with suppress(Exception):  # not installed, or the driver refuses: every vendor has its own errors
        milliwatts = 1.0 if torch.version.hip else 1e-3
        return {
            "gpu_utilisation": torch.cuda.utilization(device) / 100.0,
            "gpu_power_w": torch.cuda.power_draw(device) * milliwatts,
            "gpu_memory_bytes": float(torch.cuda.device_memory_used(device)),
            "gpu_clock_mhz": float(torch.cuda.clock_rate(device)),
        }
    if torch.version.hip or not shutil.which("nvidia-smi"):
        return {}
    own = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={own}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        report = subprocess.run(command, capture_output=True, text=True, timeout=INTERVAL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_smi(report)


def parse_smi(line: str) -> dict[str, float]:
    """nvidia-smi's percent, watts, MiB and MHz; unknown values are left out."""
    names = ("gpu_utilisation", "gpu_power_w", "gpu_memory_bytes", "gpu_clock_mhz")
    reading = {}
    for name, unit, value in zip(names, (0.01, 1.0, 2.0**20, 1.0), line.strip().split(","), strict=False):
        with suppress(ValueError):  # "[N/A]"
            reading[name] = float(value) * unit
    return reading
