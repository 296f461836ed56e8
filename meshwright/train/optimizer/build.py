"""The job's optimizer: which rule updates which masters, and in which format their moments are stored."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.job import Job
from meshwright.layout import most_tensor_parallel
from meshwright.model import build_architecture
from meshwright.model.sharding import PROJECTIONS
from meshwright.parallel import ShardIndex, World, one_pass_here
from meshwright.parallel.shard_index import shard_index_of
from meshwright.registries import OPTIMIZERS
from meshwright.torch_private.arithmetic import foreach_mul_
from meshwright.train.optimizer.adafactor import Adafactor
from meshwright.train.optimizer.elementwise import Elementwise, adamw, lion, sgd
from meshwright.train.optimizer.holders import Holders
from meshwright.train.optimizer.muon import Muon
from meshwright.train.optimizer.onepass import OnePassAdamW
from meshwright.train.optimizer.own import build_own, require_declared


class CombinedOptimizer:
    """Several optimizers over different masters, combined into one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all of them."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:
        """The states of all of them, by parameter."""
        return {master: state for part in self.parts for master, state in part.state.items()}

    def step(self) -> None:
        """Update every master that has a gradient."""
        for part in self.parts:
            part.step()


Optimizer = torch.optim.Optimizer | CombinedOptimizer


def build_optimizer(
    masters: Mapping[str, nn.Parameter],
    job: Job,
    shards: Mapping[str, ShardIndex] | None = None,
    world: World | None = None,
    working: Mapping[nn.Parameter, Tensor] | None = None,
) -> Optimizer:
    """The job's optimizer over named masters, which are `shards` of full parameters in a world, or full ones without.

    Norms, biases and other vectors are never decayed. Given the working copies of all masters, it may write them in
    the same pass (`OnePassAdamW`). All ranks of a world call this together.
    """
    whole = {name: shard_index_of(master, tuple(master.shape)) for name, master in masters.items()}
    places = {master: (shards or whole)[name] for name, master in masters.items()}
    everything = list(masters.values())
    if job.optimizer.name not in OPTIMIZERS.built_in:
        return build_own(job, everything)
    group = partial(_groups, job, _cut_by_columns(job, masters))
    if job.optimizer.name == "adafactor":
        holders = Holders(world or _alone(everything))
        packed = {master: _matrices_in(job, name) for name, master in masters.items()}
        return Adafactor(group(everything), places, holders, packed, lr=job.optimizer.lr, eps=job.optimizer.eps)
    if working and one_pass_here(job, everything[0].device):
        return OnePassAdamW(group(everything), working, **_adamw_settings(job))
    if job.optimizer.name != "muon":
        return _elementwise(job.optimizer.name, group(everything), job, places)
    names = _with_roles(job, masters, (*PROJECTIONS, "experts"))  # embedding, head and vectors use AdamW
    projections = [masters[name] for name in names]
    others = [master for name, master in masters.items() if name not in names]
    holders = Holders(world or _alone(everything))
    settings = {"lr": job.optimizer.lr, "momentum": job.optimizer.momentum}
    parts: list[torch.optim.Optimizer] = []
    if projections:
        packed = {masters[name]: _matrices_in(job, name) for name in names}
        parts.append(Muon(group(projections), places, holders, packed, **settings))
    if others:
        rest = _elementwise("adamw", group(others), job, places)
        for parameters in rest.param_groups:
            parameters["lr_factor"] = (job.optimizer.adamw_lr or job.optimizer.lr) / job.optimizer.lr
        parts.append(rest)
    return CombinedOptimizer(parts)


def _matrices_in(job: Job, name: str) -> int:
    """How many matrices a parameter consists of: the weights of experts are packed, and gates with the rows of up."""
    if job.model.experts is None or ".moe.experts." not in name:
        return 1
    return job.model.experts.count * (2 if ".gate_up." in name else 1)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set every group's rate: the schedule's, times its own factor if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)


@torch.no_grad()
def clip_gradients(masters: Iterable[nn.Parameter], norm: float, limit: float, scale: float = 1.0) -> None:
    """Scale gradients down if their global norm exceeds the limit; a limit of 0 disables clipping.

    If the gradients (not the norm) carry a factor `scale`, it is removed in the same pass.
    """
    factor = clip_factor(norm, limit, scale)
    gradients = [p.grad for p in masters if p.grad is not None]
    if factor != 1.0 and gradients:  # a pipeline stage may have nothing to train
        foreach_mul_(gradients, factor)


def clip_factor(norm: float, limit: float, scale: float = 1.0) -> float:
    """The factor that clipping multiplies gradients by."""
    return (limit / (norm + 1e-6) if limit > 0 and not norm <= limit else 1.0) / scale


def parts_of(optimizer: Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that a combined one consists of."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def states_of(optimizer: Optimizer, masters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
    """Every tensor the optimizer stores, by the parameter's name and its own; empty before the first step."""
    states = {name: dict(optimizer.state.get(master, {})) for name, master in masters.items()}
    if hasattr(optimizer, "states"):  # as users' own declare
        require_declared(optimizer, masters, states)
    return states


def state_names(part: torch.optim.Optimizer, master: nn.Parameter) -> set[str]:
    """The tensors that one part of an optimizer stores for a parameter once it was updated."""
    if isinstance(part, Elementwise | Muon | Adafactor):
        return part.state_names(master)
    if hasattr(part, "states"):
        return set(part.states)
    return {"step", "exp_avg", "exp_avg_sq"}  # of AdamW, both torch's and ours


def _elementwise(
    name: str, groups: list[dict[str, Any]], job: Job, shards: Mapping[nn.Parameter, ShardIndex]
) -> torch.optim.Optimizer:
    settings = job.optimizer
    if name == "adamw" and job.precision.optimizer_states == "fp32":
        decays = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
        return torch.optim.AdamW(decays, fused=True, **_adamw_settings(job))
    rule = {"adamw": adamw(), "sgd": sgd(settings.momentum), "lion": lion()}[name]
    return Elementwise(groups, rule, shards, momentum=settings.momentum, **_adamw_settings(job))


def _adamw_settings(job: Job) -> dict[str, Any]:
    return {"lr": job.optimizer.lr, "betas": job.optimizer.betas, "eps": job.optimizer.eps}


def _groups(job: Job, cut: set[nn.Parameter], masters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices with decay and in the job's format; vectors, which are small, without decay and exact.

    `cuts` is the number of parts tensor parallelism may split a group's columns into, in this or any layout.
    """
    matrices, vectors = [p for p in masters if p.dim() >= 2], [p for p in masters if p.dim() < 2]
    decay, form = job.optimizer.weight_decay, job.precision.optimizer_states
    groups: list[dict[str, Any]] = [
        {"params": [p for p in matrices if p not in cut], "weight_decay": decay, "format": form, "cuts": 1},
        {"params": vectors, "weight_decay": 0.0, "format": "fp32", "cuts": 1},
    ]
    if cut:
        theirs = [p for p in matrices if p in cut]
        groups.append(
            {"params": theirs, "weight_decay": decay, "format": form, "cuts": most_tensor_parallel(job.model)}
        )
    return groups


def _cut_by_columns(job: Job, masters: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    """The matrices whose columns tensor parallelism splits; only needed for 8-bit states, which share scales."""
    if job.precision.optimizer_states != "int8":
        return set()
    return {masters[name] for name in _with_roles(job, masters, ("row",))}


def _with_roles(job: Job, masters: Mapping[str, nn.Parameter], roles: tuple[str, ...]) -> list[str]:
    """The masters that are matrices of modules with these roles in the model's sharding table."""
    with torch.device("meta"):
        architecture = build_architecture(job.model)
    matrices = [name for name, master in masters.items() if master.dim() == 2]
    return [name for name in matrices if architecture.role(name.rpartition(".")[0]) in roles]


def _alone(masters: list[nn.Parameter]) -> World:
    return World(masters[0].device)
