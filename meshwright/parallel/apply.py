"""What turns a single-device model into the one a rank runs: the order of transformations, readable as a recipe."""

from typing import cast

import torch
from torch import nn

from meshwright.job import Job
from meshwright.model import build_architecture
from meshwright.parallel.materialise import fill
from meshwright.parallel.precision import DTYPES, Weights, WholeWeights
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.parallel.world import World
from meshwright.parallel.zero import ShardedWeights, apply_zero


def build(job: Job, world: World, dtype: torch.dtype | None = None) -> tuple[nn.Module, Weights]:
    """The job's model as this rank holds it, with its first weights; `dtype` overrides master and compute formats."""
    master = dtype or torch.float32
    compute = dtype or DTYPES[job.precision.compute]
    with torch.device("meta"):
        architecture = build_architecture(job.model)
    model = architecture.model.to(master)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    if job.layout.tp > 1 and world.mesh is not None:
        apply_tensor_parallel(architecture, job, world.mesh["tp"])
    if job.run.compile:
        for block in cast(nn.ModuleDict, model.layers).values():
            block.compile()
    if world.mesh is not None:
        apply_zero(model, job.layout, world.mesh, compute, master)
    model.to_empty(device=world.device)

    weights: Weights
    if world.mesh is None:
        weights = WholeWeights(model, compute)
    else:
        weights = ShardedWeights(model, job.layout.zero_stage, shapes)
    fill(weights.masters, weights.pieces(), job.model, job.run.seed)
    weights.refresh()
    return model, weights
