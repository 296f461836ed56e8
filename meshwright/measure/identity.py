"""What a profile says about itself: the device, its host, versions, date, and how it was measured."""

import os
import platform
from typing import Any

import torch

from meshwright.hardware import find_gpu, today
from meshwright.hardware.profile import CPU, FORMAT, file_name_of
from meshwright.ranks import Place
from meshwright.runs.provenance import cpu_name, describe_environment
from meshwright.version import VERSION

_HOW = (
    "meshwright calibrate: medians of repeated calls with random operands larger than the caches; launches on the "
    "host, everything else on the device, collectives over all ranks together"
)


def identity(device: torch.device) -> dict[str, Any]:
    """The fields of a profile that identify the device, and how it is measured."""
    about = describe_environment([])
    common: dict[str, Any] = {
        "format": FORMAT,
        "date": today(),
        "torch": torch.__version__,
        "device": device_words(device),
        "driver": about["driver"] if device.type == "cuda" else None,
        "host_cpu": about["cpu"],
        "host_cores": len(os.sched_getaffinity(0)),
        "machine": about["hostname"],
        "meshwright": VERSION,
        "how": _HOW,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = find_gpu(properties.name, properties.total_memory)
        key = gpu.key if gpu else "-".join(properties.name.lower().replace("/", " ").split())
        memory = properties.total_memory / 2**30
        return common | {
            "gpu": key,
            "cuda": torch.version.cuda,
            "memory_gib": round(memory, 2),
            "units": properties.multi_processor_count,
        }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return common | {"gpu": CPU, "memory_gib": round(memory, 2), "units": torch.get_num_threads()}


def profile_name(device: torch.device, place: Place | None) -> str:
    """The file that a profile of this device has in a folder of profiles."""
    ranks = 1 if place is None else ranks_here(place)
    return file_name_of(identity(device)["gpu"], ranks)


def ranks_here(place: Place) -> int:
    """Ranks on this machine."""
    return place.local_size or int(os.environ.get("SLURM_NTASKS_PER_NODE", place.size))


def device_words(device: torch.device) -> str:
    """The device's product name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU {cpu_name() or platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"
