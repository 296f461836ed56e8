"""GPUs and what they can do, and an examination of this machine; imports no torch until the machine is examined."""

from meshwright.hardware.doctor import Finding, examine
from meshwright.hardware.gpus import Gpu, Link, find_gpu, gpu_by_key, known_gpus, peak_flops

__all__ = ["Finding", "Gpu", "Link", "examine", "find_gpu", "gpu_by_key", "known_gpus", "peak_flops"]
