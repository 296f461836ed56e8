"""How many ranks a cluster can hold, and how they are split over its machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.job import Job
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
    why: str = "as submitted"
    """Why this layout."""

    def resources(self, gpus: bool) -> list[dict[str, float]]:
        """What each bundle reserves: a CPU per rank, and a GPU where it computes on one."""
        one = {"CPU": float(self.ranks_per_bundle)} | ({"GPU": float(self.ranks_per_bundle)} if gpus else {})
        return [dict(one) for _ in range(self.bundles)]


def split(job: Job, room: Sequence[int]) -> Split | None:
    """The job's ranks in as few bundles as these machines allow; None if they do not fit.

    `room` is how many ranks each machine holds.
    """
    found = bundles_of(ranks_of(job.layout), job.layout.tp, room)
    return None if found is None else Split(job, *found)


def bundles_of(ranks: int, tp: int, room: Sequence[int]) -> tuple[int, int] | None:
    """How many bundles of how many ranks: as few as these machines allow, each of whole tensor-parallel groups."""
    for bundles in range(1, ranks // tp + 1):
        each, rest = divmod(ranks, bundles)
        if not rest and each % tp == 0 and sum(here // each for here in room) >= bundles:
            return bundles, each
    return None


def room_of(nodes: Sequence[dict[str, Any]], gpus: bool) -> list[int]:
    """How many ranks each machine of a cluster that is alive holds if nothing else runs there; most first."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    names = ("CPU", "GPU") if gpus else ("CPU",)
    return sorted((int(min(one.get(name, 0) for name in names)) for one in resources), reverse=True)


def has_gpus(nodes: Sequence[dict[str, Any]]) -> bool:
    """Whether any machine that is alive has a GPU."""
    return any(node["Alive"] and node["Resources"].get("GPU", 0) for node in nodes)
