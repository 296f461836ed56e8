"""GPUs, Slurm sites that have them, and an examination of this machine; no torch until the machine is examined."""

from meshwright.hardware.doctor import Finding, examine
from meshwright.hardware.gpus import Gpu, Link, find_gpu, gpu_by_key, known_gpus, peak_flops
from meshwright.hardware.sites import Site, find_site, known_sites, unsourced

__all__ = [
    "Finding",
    "Gpu",
    "Link",
    "Site",
    "examine",
    "find_gpu",
    "find_site",
    "gpu_by_key",
    "known_gpus",
    "known_sites",
    "peak_flops",
    "unsourced",
]
