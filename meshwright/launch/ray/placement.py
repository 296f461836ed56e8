"""How many ranks a cluster can hold, and how they are split over its machines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.launch.restarts import shrunk
from meshwright.layout import ranks_of

HEAD = "node:__internal_head__"
"""A resource that only a cluster's head has."""


@dataclass(frozen=True)
class Split:
    """Ranks in equal bundles. Ray puts all of a bundle on one machine, so tensor-parallel ranks never leave theirs;
    of bundles of one rank it promises only to pack them where it can."""

    job: Job
    bundles: int
    ranks_per_bundle: int

    def resources(self, gpus: bool) -> list[dict[str, float]]:
        """What each bundle reserves: a CPU per rank, and a GPU where it computes on one."""
        one = {"CPU": float(self.ranks_per_bundle)} | ({"GPU": float(self.ranks_per_bundle)} if gpus else {})
        return [dict(one) for _ in range(self.bundles)]


def split(job: Job, room: Sequence[int]) -> Split | None:
    """The job's ranks in as few bundles as these machines allow; None if they do not fit.

    `room` is how many ranks each machine holds.
    """
    ranks, tp = ranks_of(job.layout), job.layout.tp
    for bundles in range(1, ranks // tp + 1):
        each, rest = divmod(ranks, bundles)
        if not rest and each % tp == 0 and sum(here // each for here in room) >= bundles:
            return Split(job, bundles, each)
    return None


def splits(job: Job, room: Sequence[int], min_ranks: int) -> Iterator[Split]:
    """What these machines can hold of a job, most ranks first: its own layout, then with fewer data-parallel ranks.

    The global batch stays as it is, and so do tp, cp and pp; a layout that would be rejected is left out.
    """
    smaller: Job | None = job
    while smaller is not None and ranks_of(smaller.layout) >= min_ranks:
        if (found := split(smaller, room)) is not None:
            yield found
        smaller = shrunk(job, ranks_of(smaller.layout) - 1)


def room_of(nodes: Sequence[dict[str, Any]], gpus: bool) -> list[int]:
    """How many ranks each machine of a cluster that is alive holds if nothing else runs there; most first."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    names = ("CPU", "GPU") if gpus else ("CPU",)
    return sorted((int(min(one.get(name, 0) for name in names)) for one in resources), reverse=True)


def has_gpus(nodes: Sequence[dict[str, Any]]) -> bool:
    """Whether any machine that is alive has a GPU."""
    return any(node["Alive"] and node["Resources"].get("GPU", 0) for node in nodes)


def require_resources(job: Job, nodes: Sequence[dict[str, Any]], gpus: bool, min_ranks: int) -> None:
    """Reject a job that these machines could not hold even if nothing else ran there."""
    room = room_of(nodes, gpus)
    if next(splits(job, room, min_ranks), None) is not None:
        return
    ranks, tp = ranks_of(job.layout), job.layout.tp
    kind = "GPU and a CPU" if gpus else "CPU"
    held = ", ".join(str(here) for here in room if here) or "none"
    together = f" with each group of layout.tp = {tp} on one machine" if tp > 1 else ""
    needs = f"{ranks} ranks" if min_ranks == ranks else f"at least {min_ranks} of {ranks} ranks"
    raise UserError(
        f"the layout needs {needs}, each a {kind}{together}, but the cluster's machines hold {held}; use a smaller "
        "layout, add machines, or let it run on fewer ranks with --min-ranks"
    )
