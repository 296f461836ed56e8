"""A rehearsal on another GPU than the cluster's: its compute at the rates that the planner has of both."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.errors import UserError
from meshwright.hardware import find_gpu, gpu_by_key
from meshwright.hardware.profile import CPU
from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.plan import Machine, machine_of, predict
from meshwright.rehearse.result import RehearsedRank

_PASSES = ("forward", "loss", "backward", "forward and backward")
_UPDATE = ("reduce", "optimizer")
_KINDS, _UPDATES = ("products", "attention", "memory"), "update"


def scaled_to(
    job: Job, cluster: Cluster, ranks: Sequence[RehearsedRank], device: str
) -> tuple[list[RehearsedRank], tuple[str, ...]]:
    """The ranks as the cluster's GPU would compute them, with a warning if that is not the one they ran on.

    Each kind of kernel takes as many times as long as its plan for the other GPU says. With measured profiles of both,
    the plans use them; a profile of only one would compare what was measured with what is modelled, and none is used.
    The kinds' shares of a step are those of the measured kernels, or of the planned ones if none were recorded.
    """
    here, there = find_gpu(device), cluster.gpu or ""
    if (device == "CPU") != (there == CPU):
        raise UserError(
            f"ranks were run on {device}, whose compute says nothing of {there}'s; rehearse on a GPU to see the step"
        )
    if is_same_gpu(cluster, device):
        return list(ranks), ()
    if here is None:
        return list(ranks), (
            f"{device} is not in the hardware table: its compute is taken as that of {there}, whatever their rates are",
        )
    clusters = [cluster.model_copy(update={"gpu": gpu}) for gpu in (here.key, there)]
    machines = [machine_of(one) for one in clusters]
    if any(machine.measured is None for machine in machines):
        machines = [machine_of(one, profiled=False) for one in clusters]
    own, its = (_planned(job, machine) for machine in machines)
    longer = {kind: its[kind] / own[kind] if own[kind] else 1.0 for kind in (*_KINDS, _UPDATES)}
    scaled = [_scaled(rank, longer, _shares(rank, own)) for rank in ranks]
    words = ", ".join(f"{kind} × {longer[kind]:.2f}" for kind in _KINDS)
    return scaled, (
        f"ranks were run on {here.key}, and the cluster has {there}: compute is scaled by the plans for both ({words})",
    )


def is_same_gpu(cluster: Cluster, device: str) -> bool:
    """Whether ranks were run on what the cluster has."""
    if CPU in (cluster.gpu, device.lower()):
        return cluster.gpu == device.lower()
    here = find_gpu(device)
    return here is not None and cluster.gpu is not None and here.key == gpu_by_key(cluster.gpu).key


def _planned(job: Job, machine: Machine) -> dict[str, float]:
    """Seconds of a step by kind of kernel as planned for a GPU, with those of the update."""
    phases = predict(job, machine).phases
    names = {"products": "products", "attention": "attention", "memory": "elementwise"}
    found = {kind: sum(phases[f"{one} {name}"] for one in ("forward", "backward")) for kind, name in names.items()}
    return {**found, _UPDATES: phases["optimizer"]}


def _shares(rank: RehearsedRank, planned: Mapping[str, float]) -> dict[str, float]:
    """Seconds of forward and backward by kind of kernel, on the GPU they ran on."""
    if rank.kernels is not None:
        kinds: Mapping[str, float] = rank.kernels["kinds_s"]
        elsewhere = ("products", "attention", "communication", "optimizer")
        return {
            "products": kinds["products"],
            "attention": kinds["attention"],
            "memory": sum(seconds for kind, seconds in kinds.items() if kind not in elsewhere),
        }
    return {kind: planned[kind] for kind in _KINDS}


def _scaled(rank: RehearsedRank, longer: Mapping[str, float], shares: Mapping[str, float]) -> RehearsedRank:
    passes = sum(shares[kind] * longer[kind] for kind in _KINDS) / sum(shares.values())
    times = dict.fromkeys(_PASSES, passes) | dict.fromkeys(_UPDATE, longer[_UPDATES])
    phases = {name: seconds * times.get(name, 1.0) for name, seconds in rank.phases_s.items()}
    return replace(
        rank,
        step_s=rank.step_s * sum(phases.values()) / sum(rank.phases_s.values()),
        phases_s=phases,
        actions_s={name: seconds * passes for name, seconds in rank.actions_s.items()},
    )
