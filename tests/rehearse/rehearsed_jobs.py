"""Jobs, and ranks that ran exactly as planned: what the planner predicts of compute, as if it had been measured."""

from collections import Counter
from typing import Any

from meshwright.cost import REPEATED
from meshwright.job import Job, model_preset
from meshwright.job.devices import Cluster
from meshwright.layout import axes, ranks_of, table_of
from meshwright.plan import machine_of, predict
from meshwright.plan.context import merged_s
from meshwright.plan.groups import groups_of, stage_ranges
from meshwright.plan.host import BACKWARD, FORWARD
from meshwright.plan.kernels import device_of
from meshwright.plan.predict import layer_modes, own_software, stage_layers
from meshwright.plan.stages import stages_of
from meshwright.rehearse import Messages, RehearsedRank


def a_job(preset: str = "llama-3-8b", batch: int = 64, sequence: int = 4096, **sections: Any) -> Job:
    """A preset's model in bf16, compiled, as large as on a cluster; sections as given."""
    sizes = {"sequence_length": sequence, "global_batch": batch, "micro_batch": 1}
    given = {"model": model_preset(preset), "precision": {"compute": "bf16"}, "run": {"compile": True}, "batch": sizes}
    return Job.model_validate({**given, **sections})


def cluster_of(job: Job, gpu: str = "h100") -> Cluster:
    """Nodes of eight, as many as the job fills."""
    return Cluster(nodes=ranks_of(job.layout) // 8, gpus_per_node=8, gpu=gpu)


def as_planned(job: Job, cluster: Cluster, slower: float = 1.0) -> list[RehearsedRank]:
    """One rank of every pipeline rank, whose compute takes `slower` times what is predicted."""
    return [_rank(job, cluster, rank, slower) for rank in range(job.layout.pp)]


def _rank(job: Job, cluster: Cluster, rank: int, slower: float) -> RehearsedRank:
    phases, stages = predict(job, cluster).phases, _stage_seconds(job, cluster)
    update = phases["optimizer"] or phases.get("update on the host", 0.0) / cluster.gpus_per_node
    rest = {"data": 0.0, "optimizer": slower * update, "other": slower * phases["host"]}
    if job.layout.pp == 1:
        forward, backward, _ = (slower * job.accumulation * seconds for seconds in stages[0])
        waits = phases.get(FORWARD, 0.0), phases.get(BACKWARD, 0.0)
        loss = 0.1 * forward
        passes = {"forward": forward - loss + slower * waits[0], "loss": loss, "backward": backward + slower * waits[1]}
        passes["backward"] += slower * phases.get("waiting for transfers to the host", 0.0)
        return _made(job, rank, (0,), rest | passes, {})
    table = table_of(job)
    held = table.stages_of(rank)
    times = Counter(f"{action.kind.value}{action.stage}" for action in table.orders[rank])
    actions = {}
    for stage in held:
        forward, backward, weights = (slower * seconds for seconds in stages[stage % len(stages)])
        named = {"F": forward, "B": backward, "I": backward - weights, "W": weights}
        actions |= {f"{kind}{stage}": seconds for kind, seconds in named.items() if f"{kind}{stage}" in times}
    both = sum(times[name] * seconds for name, seconds in actions.items())
    return _made(job, rank, held, rest | {"forward and backward": both}, actions)


def _stage_seconds(job: Job, cluster: Cluster) -> list[tuple[float, float, float]]:
    """Per stage its forward, its backward, and of that what may come later: without any message."""
    machine, layers = machine_of(cluster), stage_layers(job)
    modes, software = layer_modes(job, layers), own_software(job)
    device = device_of(machine.gpu, machine.rates, job.precision.format, machine.measured)
    groups = groups_of(job, machine.wires.gpus_per_node)
    stages = stages_of(job, device, software, machine.wires, groups, layers, modes)
    ahead, back = merged_s(job, device)
    found = []
    for one, own in zip(stages, stage_ranges(layers), strict=True):
        again = sum(ahead for layer in own if modes[layer] in REPEATED)
        merged = len(own) * ahead, len(own) * back + again
        found.append((one.work.forward + merged[0], one.work.backward + merged[1], one.work.weight_matmul))
    return found


def _made(job: Job, rank: int, stages: tuple[int, ...], phases: dict[str, float], actions: Any) -> RehearsedRank:
    first = rank * ranks_of(job.layout) // axes(job.layout)["pp"]
    return RehearsedRank(
        rank=first,
        pipeline_rank=rank,
        stages=tuple(stages),
        alike=ranks_of(job.layout) // job.layout.pp,
        state="measured",
        steps=3,
        step_s=sum(phases.values()),
        phases_s=phases,
        actions_s=actions,
        kernels=None,
        memory=None,
        needed_bytes=None,
        messages=(),
        checkpoint_bytes=None,
        checkpoint_s=None,
    )


def message(kind: str, axis: str, ranks: int, size: float, count: int = 1) -> Messages:
    """One kind of messages over so many ranks."""
    return Messages(kind, axis, tuple(range(ranks)), round(size), count)
