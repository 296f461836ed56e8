"""Who this process is among its peers, and the one mesh they form."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.job import Job
from meshwright.parallel.layout import axes, require_layout


@dataclass(frozen=True)
class World:
    """One rank of a run; a single device is a world of one without a mesh."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    mesh: DeviceMesh | None = None

    def axis_size(self, name: str) -> int:
        """Ranks along a mesh axis."""
        return 1 if self.mesh is None else self.mesh[name].size()

    def axis_rank(self, name: str) -> int:
        """This rank's place along a mesh axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(name)

    @property
    def data_ranks(self) -> int:
        """How many shares the global batch is cut into."""
        return self.axis_size("dp_replicate") * self.axis_size("dp_shard")

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank reads; ranks that split the model or the sequence read the same."""
        return self.axis_rank("dp_replicate") * self.axis_size("dp_shard") + self.axis_rank("dp_shard")

    def sum_over_world(self, values: Sequence[torch.Tensor | float]) -> list[float]:
        """The sums of some scalars over all ranks, in float64 and in one collective."""
        scalars = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        stacked = torch.stack(scalars)
        if self.size > 1:
            dist.all_reduce(stacked)
        totals: list[float] = stacked.tolist()
        return totals

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


def join_world(job: Job, device: torch.device) -> World:
    """Find this process's rank in torchrun's or Slurm's environment, meet the others, and form the job's mesh."""
    rank, size, local_rank = _identity()
    require_layout(job, size)
    if size == 1:
        return World(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size)
    sizes = axes(job.layout)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return World(device, rank, size, local_rank, mesh)


def _identity() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun or srun tells them; alone without either."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        if all(name in os.environ for name in names):
            rank, size, local_rank = (int(os.environ[name]) for name in names)
            return rank, size, local_rank
    return 0, 1, 0
