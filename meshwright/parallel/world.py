"""This process's rank among its peers, and the one mesh they form."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.job import Job
from meshwright.layout import axes, require_layout
from meshwright.ranks import ALONE, own_place, require_master
from meshwright.torch_private.processes import give_gloo_one_thread

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All ranks' tensors in one: torch 2.13 renames it and warns about the old name."""

Replay = Callable[[int | None, torch.Tensor, torch.Tensor], Mapping[int, torch.Tensor] | None]
"""From a step (None in an evaluation), the numbers of samples (B) and places in them (S) to the experts of these tokens
(B, S, K) by layer."""


@dataclass(frozen=True)
class World:
    """One rank of a run; a single device is a world of one without a mesh."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """This rank's place along each of the layout's axes and the axis's size."""
    mesh: DeviceMesh | None = None
    """(pp, replicas, shards, tp): ranks that share a sequence hold the same parameters, so cp is part of the shards,
    or of the replicas where nothing is sharded."""
    expert_mesh: DeviceMesh | None = None
    """(pp, replicas, expert_shards, ep): the same ranks for the weights of experts, whose shards also span tp; None
    without experts."""
    context_group: dist.ProcessGroup | None = None
    """The ranks that share this one's sequences; None where cp is 1."""
    replay: Replay | None = None
    """Replaces the choice of experts, where a check replays that of another run."""

    def axis_size(self, name: str) -> int:
        """Ranks along an axis."""
        return self.axes[name][1] if self.axes else 1

    def axis_rank(self, name: str) -> int:
        """This rank's place along an axis."""
        return self.axes[name][0] if self.axes else 0

    @property
    def data_ranks(self) -> int:
        """How many shares the global batch is split into."""
        return self.axis_size("dp_replicate") * self.axis_size("dp_shard")

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank reads; ranks that split the model or the sequence read the same."""
        return self.axis_rank("dp_replicate") * self.axis_size("dp_shard") + self.axis_rank("dp_shard")

    @property
    def leads_data(self) -> bool:
        """Whether this is the first of the ranks that read the same share of the batch."""
        return not any(self.axis_rank(name) for name in ("pp", "cp", "tp"))

    def sum_over_world(self, values: Sequence[torch.Tensor | float]) -> list[float]:
        """The sums of some scalars over all ranks, in float64 and in one collective."""
        return self.start_sum(values)()

    def start_sum(self, values: Sequence[torch.Tensor | float]) -> Callable[[], list[float]]:
        """The same, to be waited for later: what a GPU is given to do meanwhile is not waited for."""
        # The host's own numbers go to a GPU in one copy, or not at all: it has nothing to do until they are back. What
        # is a number on one rank may be a tensor on another: every value keeps its place.
        made = {place: value for place, value in enumerate(values) if isinstance(value, torch.Tensor)}
        known = [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values]
        if self.size == 1:
            if not made:
                return lambda: known
            read = _copied_to_host(torch.stack([value.to(self.device, torch.float64) for value in made.values()]))
            return lambda: list((dict(enumerate(known)) | dict(zip(made, read(), strict=True))).values())
        numbers = torch.tensor(known, dtype=torch.float64, device=self.device)
        together = torch.stack(
            [made[place].to(numbers) if place in made else number for place, number in enumerate(numbers)]
        )
        dist.all_reduce(together)
        return _copied_to_host(together)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


def _copied_to_host(numbers: torch.Tensor) -> Callable[[], list[float]]:
    """Start to copy a tensor's numbers; the result waits for them."""
    if not numbers.is_cuda:
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> list[float]:
        done.synchronize()
        found: list[float] = copy.tolist()
        return found

    return read


def join_world(job: Job, device: torch.device) -> World:
    """Find this process's rank in torchrun's or Slurm's environment, connect to the others, and form the job's mesh."""
    place = own_place() or ALONE
    rank, size = place.rank, place.size
    require_layout(job, size)
    if size == 1:
        return World(device)
    give_gloo_one_thread()
    if not dist.is_initialized():
        require_master(os.environ)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size)
    layout = job.layout
    sizes = axes(layout)
    numbered = torch.arange(size).view(*sizes.values())
    places = [int(place) for place in (numbered == rank).nonzero()[0]]
    # However ranks are numbered, cp is the neighbour of the axis whose states it shares.
    beside = ("cp", "dp_shard") if layout.zero_stage == 0 else ("dp_shard", "cp")
    order = [list(sizes).index(name) for name in ("pp", "dp_replicate", *beside, "tp")]
    replicas = layout.dp_replicate * (layout.cp if layout.zero_stage == 0 else 1)
    ranks = numbered.permute(order).reshape(layout.pp, replicas, -1, layout.tp)
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("pp", "replicas", "shards", "tp"))
    expert_mesh = None
    if job.model.experts is not None:
        by_expert = ranks.reshape(layout.pp, replicas, -1, layout.ep)
        expert_mesh = DeviceMesh(device.type, by_expert, mesh_dim_names=("pp", "replicas", "expert_shards", "ep"))
    context_group = None
    if layout.cp > 1:
        sharing = numbered.movedim(list(sizes).index("cp"), -1).reshape(-1, layout.cp)
        context_group, _ = dist.new_subgroups_by_enumeration(sharing.tolist())  # type: ignore[no-untyped-call]
    here = {name: (place, sizes[name]) for name, place in zip(sizes, places, strict=True)}
    return World(device, rank, size, place.local_rank, here, mesh, expert_mesh, context_group)
