"""A machine measured by one process or by several ranks: the device by rank 0, the links by all."""

import os

import torch
import torch.distributed as dist

from meshwright.hardware import Profile
from meshwright.launch.ranks import Place
from meshwright.measure.calibrate import Calibration, Told
from meshwright.measure.collectives import collectives


def calibrated(device: torch.device, place: Place | None, *, quick: bool, told: Told) -> Profile | None:
    """The profile on rank 0 or in a process alone; None on other ranks."""
    if place is None:
        return Calibration(device, quick, told).profile()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    profile = Calibration(device, quick, told).profile() if place.rank == 0 else None
    dist.barrier()  # nothing else may run while links are measured
    local = place.local_size or int(os.environ.get("SLURM_NTASKS_PER_NODE", place.size))
    told("collectives")
    found = collectives(device, lambda ranks: len({rank // local for rank in ranks}))
    dist.destroy_process_group()
    return None if profile is None else profile.model_copy(update={"collectives": tuple(found)})
