"""GPUs, their measured profiles, Slurm sites, and a check of this machine; only the check imports torch."""

from meshwright.hardware.clusters import completed
from meshwright.hardware.doctor import Finding, examine
from meshwright.hardware.gpus import Gpu, Link, find_gpu, gpu_by_key, known_gpus, mfu_peak_flops, peak_flops
from meshwright.hardware.profile import Profile, is_known, today
from meshwright.hardware.profile_files import (
    FoundProfile,
    find_profile,
    profile_of,
    profiles_folder,
    profiles_from,
    read_profile,
    require_given_profile_of,
    write_profile,
)
from meshwright.hardware.sites import Kubernetes, Site, find_site, known_sites, site_names, unsourced

__all__ = [
    "Finding",
    "FoundProfile",
    "Gpu",
    "Kubernetes",
    "Link",
    "Profile",
    "Site",
    "completed",
    "examine",
    "find_gpu",
    "find_profile",
    "find_site",
    "gpu_by_key",
    "is_known",
    "known_gpus",
    "known_sites",
    "mfu_peak_flops",
    "peak_flops",
    "profile_of",
    "profiles_folder",
    "profiles_from",
    "read_profile",
    "require_given_profile_of",
    "site_names",
    "today",
    "unsourced",
    "write_profile",
]
