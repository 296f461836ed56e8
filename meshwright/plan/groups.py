"""The ranks that share each axis of a layout, on how many nodes they are, and the layers of each stage."""

from dataclasses import dataclass

from meshwright.cost import expert_sharers
from meshwright.job import Job
from meshwright.plan.communication import Group, group_of


@dataclass(frozen=True)
class Groups:
    """The ranks a rank shares each axis with."""

    tp: Group
    cp: Group
    shard: Group
    """dp_shard × cp: who shares states and gradients."""
    replicate: Group
    data: Group
    """Everyone who holds the same parameters."""
    experts: Group
    """Who holds the other experts of the same layers."""
    expert_shard: Group
    """Who shares the states and gradients of the same experts."""
    expert_data: Group
    """Everyone who holds the same experts."""
    stages_share_node: bool


def groups_of(job: Job, gpus_per_node: int) -> Groups:
    """Which ranks are on which nodes, numbered as in the mesh."""
    layout = job.layout
    inner = layout.tp * layout.cp
    data_stride = inner * (layout.pp if layout.order == "dp-outside" else 1)
    pipe_stride = inner * (1 if layout.order == "dp-outside" else layout.dp_shard * layout.dp_replicate)
    along = layout.tp if data_stride == inner else data_stride
    shared = expert_sharers(job)
    # Expert-parallel ranks are neighbours: those of one tensor- and context-parallel group first, then of the next.
    spread = layout.ep * (1 if layout.ep <= inner or data_stride == inner else data_stride // inner)
    return Groups(
        tp=group_of(layout.tp, 1, gpus_per_node),
        cp=group_of(layout.cp, layout.tp, gpus_per_node),
        shard=group_of(layout.dp_shard * layout.cp, along, gpus_per_node),
        replicate=group_of(layout.dp_replicate, data_stride * layout.dp_shard, gpus_per_node),
        data=group_of(layout.dp_shard * layout.dp_replicate * layout.cp, along, gpus_per_node),
        experts=group_of(layout.ep, spread // layout.ep, gpus_per_node),
        expert_shard=group_of(shared, spread, gpus_per_node),
        expert_data=group_of(shared * layout.dp_replicate, spread, gpus_per_node),
        stages_share_node=pipe_stride * layout.pp <= gpus_per_node,
    )


def stage_ranges(layers: list[int]) -> list[range]:
    """The layers of each stage, by their numbers of layers along the model."""
    ends = [sum(layers[: place + 1]) for place in range(len(layers))]
    return [range(end - count, end) for end, count in zip(ends, layers, strict=True)]
