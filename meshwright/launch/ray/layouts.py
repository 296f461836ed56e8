"""Which layout a run takes on the machines that there are: its own degrees where they fit, else the planner's choice.

The global batch, the model and the data stay as they are in all of them, so every sample is seen once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from meshwright.errors import UserError
from meshwright.hardware import completed, find_profile, known_gpus
from meshwright.hardware.profile import CPU
from meshwright.job import Job, job_of_table
from meshwright.job.devices import Cluster
from meshwright.launch.ray.placement import Split, bundles_of, split
from meshwright.launch.restarts import shrunk
from meshwright.layout import ranks_of, resolve_for
from meshwright.plan import predict, search

LAYOUT_FIELDS = (
    *(f"layout.{name}" for name in ("dp_replicate", "dp_shard", "zero", "tp", "cp", "ep", "pp")),
    *(f"layout.{name}" for name in ("schedule", "virtual_stages", "split")),
    *("batch.micro_batch", "memory.recompute", "memory.offload"),
)
"""What the planner may choose anew."""
_STAND_IN = "h100"
"""By which layouts are ranked if nothing is known of the devices."""
_KIND = "accelerator_type:"
"""What Ray calls a machine's GPUs, among its resources."""
_CHOICES = 20
"""Layouts of a search that are looked at: in some, tensor-parallel ranks would be on several machines."""


def layout_fields(job: Job) -> dict[str, Any]:
    """Their values in a job."""
    values = job.model_dump(mode="json")
    return {name: values[name.partition(".")[0]][name.partition(".")[2]] for name in LAYOUT_FIELDS}


def splits(job: Job, room: Sequence[int], min_ranks: int, gpu: str | None = None) -> Iterator[Split]:
    """What these machines can hold of a job, the first choice first: its own layout; then fewer data-parallel ranks
    with its tp, cp, ep and pp; then, if ranks may be missing at all, the planner's layouts, most ranks first.

    `gpu` is what its ranks run on, None if that is not known. A layout that would be rejected, or is predicted not to
    fit the memory of known devices, is left out; the job's own is taken as it is.
    """
    smaller: Job | None = job
    while smaller is not None and ranks_of(smaller.layout) >= min_ranks:
        if (found := split(smaller, room)) is not None:
            if smaller is job:
                yield found
            elif _fits(found, gpu):
                yield replace(found, why="fewer data-parallel ranks")
        smaller = shrunk(job, ranks_of(smaller.layout) - 1)
    if min_ranks < ranks_of(job.layout):
        yield from _planned(job, room, min_ranks, gpu)


def _planned(job: Job, room: Sequence[int], min_ranks: int, gpu: str | None) -> Iterator[Split]:
    """The fastest layout by prediction for every number of ranks that has one."""
    for ranks in range(min(sum(room), ranks_of(job.layout)), min_ranks - 1, -1):
        place = bundles_of(ranks, 1, room)
        if place is None:
            continue
        try:
            machines = _machines(*place, gpu)
            found = search(resolve_for(job, machines), machines, top=_CHOICES).best
        except UserError:  # the batch cannot be shared by so many, or the model cannot be predicted
            continue
        # A search builds its jobs unchecked.
        jobs = (job_of_table(one.job.model_dump(mode="json", exclude_unset=True), "the plan") for one in found)
        fitting = (one for candidate in jobs if (one := split(candidate, room)) is not None)
        if (best := next(fitting, None)) is not None:
            yield replace(best, why=f"planned for {_words(*place, gpu)}, as its own degrees do not fit")


def _fits(found: Split, gpu: str | None) -> bool:
    if gpu is None:
        return True
    try:
        machines = _machines(found.bundles, found.ranks_per_bundle, gpu)
        return predict(resolve_for(found.job, machines), machines).fits
    except UserError:  # the model cannot be predicted
        return True


def _machines(nodes: int, each: int, gpu: str | None) -> Cluster:
    return Cluster(nodes=nodes, gpus_per_node=each, gpu=gpu or _STAND_IN)


def _words(nodes: int, each: int, gpu: str | None) -> str:
    """Machines in words, with what was guessed."""
    place = f"{nodes * each} rank{'s' * (nodes * each > 1)} on {nodes} machine{'s' * (nodes > 1)}"
    return f"{place} of {gpu}" if gpu else f"{place}, ranked as on {_STAND_IN}"


def gpu_of(job: Job, nodes: Sequence[dict[str, Any]], gpus: bool) -> str | None:
    """What ranks run on, by the planner's name: as the job's [cluster] says, else as Ray says; a CPU only if
    `meshwright calibrate` has measured it. None if that is not known."""
    if not gpus:
        return CPU if find_profile(CPU) is not None else None
    if (job.cluster.gpu or job.cluster.name) is not None:
        return completed(job.cluster).gpu
    names = {name.lower() for node in nodes if node["Alive"] for name in node["Resources"]}
    kinds = {name.removeprefix(_KIND) for name in names if name.startswith(_KIND)}
    return next((one.key for one in known_gpus() if {one.key} == kinds), None)


def require_resources(job: Job, room: Sequence[int], gpus: bool, min_ranks: int, gpu: str | None) -> None:
    """Reject a job that these machines could not hold even if nothing else ran there."""
    if next(splits(job, room, min_ranks, gpu), None) is not None:
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
