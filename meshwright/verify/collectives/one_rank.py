"""Each distinct call once on a group of one rank: what the communication library itself refuses for its arguments.

One GPU is enough: NCCL checks dtype, reduce operation, counts, root and device before it looks at how many ranks there
are, and torch's group over it checks contiguity, sizes and placement. How ranks reach each other is not part of it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.torch_private.processes import give_gloo_one_thread, name_gloo_ranks
from meshwright.verify.collectives.distinct import Calls
from meshwright.verify.collectives.issue import ERRORS, Refused, first_line, issue, why_not

TIMEOUT = timedelta(seconds=60)
MESHES = (("pp", "replicas", "shards", "tp"), ("pp", "replicas", "expert_shards", "ep"))
"""As `join_world` names their axes."""

Way = Callable[[], list[dist.ProcessGroup]]
Began = Callable[[str], None]
"""Called with a description of what starts, so that a hang can be located."""


@dataclass
class Outcome:
    """What a library made of some calls."""

    library: str
    """With its version."""
    accepted: int = 0
    """Distinct calls that were issued and returned what they were given."""
    groups: int = 0
    """Groups that were created and used."""
    refused: list[str] = field(default_factory=list)
    """A sentence for each other call or way to create groups, with its origin and the reason."""
    not_replayed: dict[str, int] = field(default_factory=dict)
    """Distinct calls that one rank cannot issue, by the reason."""

    @property
    def ok(self) -> bool:
        """Whether nothing was refused."""
        return not self.refused


def replay(calls: Calls, backend: str, eager: bool = False, began: Began = lambda what: None) -> Outcome:
    """Create groups in all the ways that jobs do, and issue every call on one of them, on the default stream and on a
    side stream. With `eager` the device is named first, so that torch connects at once and splits its groups.

    This process must be in no group.
    """
    device = torch.device("cuda", 0) if "nccl" in backend else torch.device("cpu")
    outcome = Outcome(_library(device))
    with _alone(backend, device, eager):
        for name, make in _ways(device, eager).items():
            began(f"creating groups by {name}")
            _create(name, make, calls.groups, device, outcome)
        group = dist.new_group([0])
        for call, origin in calls.origins.items():
            began(f"{call} at {origin.site}")
            if (reason := why_not(group, call, device)) is not None:
                outcome.not_replayed[reason] = outcome.not_replayed.get(reason, 0) + 1
                continue
            try:
                for stream in _streams(device):
                    with stream:
                        issue(group, call, device)
                outcome.accepted += 1
            except Refused as error:
                layout = f" ({origin.layout})" if origin.layout else ""
                outcome.refused.append(f"{call} at {origin.site}{layout}: {error}")
                group = dist.new_group([0])  # a communicator may be unusable after an error
    return outcome


def _create(name: str, make: Way, times: int, device: torch.device, outcome: Outcome) -> None:
    """Create as many groups as the layout with the most has, and use each: NCCL connects at the first use."""
    wanted = outcome.groups + times
    try:
        while outcome.groups < wanted:
            for group in make():
                dist.all_reduce(torch.ones(1, device=device), group=group)
                outcome.groups += 1
    except ERRORS as error:
        outcome.refused.append(f"creating a group by {name}: {first_line(error)}")


def _ways(device: torch.device, eager: bool) -> dict[str, Way]:
    here = torch.zeros(1, 1, 1, 1, dtype=torch.int)

    def meshes() -> list[dist.ProcessGroup]:
        made = [DeviceMesh(device.type, here, mesh_dim_names=names) for names in MESHES]
        return [group for mesh in made for group in mesh.get_all_groups()]

    def split() -> list[dist.ProcessGroup]:
        group = dist.split_group(split_ranks=[[0]])
        assert group is not None  # as for a rank that is left out
        return [group]

    ways: dict[str, Way] = {
        "DeviceMesh": meshes,
        "new_subgroups_by_enumeration": lambda: [dist.new_subgroups_by_enumeration([[0]])[0]],  # type: ignore[no-untyped-call]
        "new_group": lambda: [dist.new_group([0])],
    }
    if eager:
        ways["split_group"] = split
    return ways


@contextmanager
def _alone(backend: str, device: torch.device, eager: bool) -> Iterator[None]:
    """A world of one rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, place = dist.HashStore(), device if eager else None  # type: ignore[attr-defined]
    give_gloo_one_thread()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT, device_id=place)
    name_gloo_ranks(1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _streams(device: torch.device) -> list[AbstractContextManager[object]]:
    """`fully_shard` and pipelines issue on side streams, the rest on the default one."""
    if device.type == "cpu":
        return [nullcontext()]
    return [nullcontext(), torch.cuda.stream(torch.cuda.Stream(device))]  # type: ignore[no-untyped-call]


def _library(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]
