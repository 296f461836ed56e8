"""GPUs and what they can do, what was measured of them, and an examination of this machine; no torch until then."""

from meshwright.hardware.doctor import Finding, examine
from meshwright.hardware.gpus import Gpu, Link, find_gpu, gpu_by_key, known_gpus, peak_flops
from meshwright.hardware.profile import (
    Profile,
    is_known,
    known_peak,
    profile_of,
    profiles_folder,
    read_profile,
    today,
    write_profile,
)

__all__ = [
    "Finding",
    "Gpu",
    "Link",
    "Profile",
    "examine",
    "find_gpu",
    "gpu_by_key",
    "is_known",
    "known_gpus",
    "known_peak",
    "peak_flops",
    "profile_of",
    "profiles_folder",
    "read_profile",
    "today",
    "write_profile",
]
