"""Frozen projections in 4 or 8 bits on the ranks that share them: codes are sharded as the weights would be, scales of
rows or of blocks of scales are whole on every rank."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright.checkpoint import packed_weights
from meshwright.job import Model
from meshwright.job.adapter import BLOCK, SCALES_PER_BLOCK, is_quantised
from meshwright.model.adapter import MAGNITUDE
from meshwright.model.quantised import tables
from meshwright.model.quantised_linear import ABSMAX, SCALES, TABLE, QuantisedLinear, Storage, fill_scales, storage_of
from meshwright.parallel.weights import Weights


def quantise_projections(model: nn.Module, shape: Model) -> dict[str, tuple[int, ...]]:
    """Let a model (on the meta device) store its frozen projections as codes, in place; returns the sizes of these."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and is_quantised(shape, f"{name}.weight"):
            assert shape.adapter is not None
            _quantise(linear, shape.adapter.base)
            own = linear.named_parameters(recurse=False)
            sizes |= {f"{name}.{part}": tuple(p.shape) for part, p in own if part in ("weight", ABSMAX)}
    return sizes


def _quantise(linear: nn.Linear, format_: str) -> None:
    weight, (outputs, inputs) = linear.weight, linear.weight.shape
    groups = inputs // BLOCK if format_ == "nf4" else 0
    like = partial(_like, weight)
    if format_ == "int8":
        linear.weight = like(outputs, inputs, torch.int8)
        scales = outputs
    else:
        linear.weight = like(outputs, inputs // 2, torch.uint8)
        linear.register_parameter(ABSMAX, like(outputs, groups, torch.uint8))
        linear.register_buffer(TABLE, torch.empty(len(tables()), device=weight.device), persistent=False)
        scales = 1 + -(-outputs * groups // SCALES_PER_BLOCK)
    linear.register_buffer(SCALES, torch.empty(scales, device=weight.device), persistent=False)
    storage = Storage(format_, (0, 0, groups))
    if isinstance(weight, DTensor):
        mesh, [placement] = weight.device_mesh, weight.placements
        place = mesh.get_local_rank()
        if placement == Shard(0):
            storage.place = (place * outputs // mesh.size(), 0, groups)
        elif placement == Shard(1):
            storage.place = (0, place * groups // mesh.size(), groups)
        storage.own = _own
        storage.placed = lambda made: DTensor.from_local(made, mesh, [placement], run_check=False)
        storage.apart = _apart(placement)
    cast(Any, linear).storage = storage
    if type(linear) is nn.Linear:
        linear.__class__ = QuantisedLinear


def _like(weight: Tensor, rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter that is sharded as a weight is."""
    tensor = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    if isinstance(weight, DTensor):
        tensor = distribute_tensor(tensor, weight.device_mesh, weight.placements)
    return nn.Parameter(tensor, requires_grad=False)


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _apart(placement: Any) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    """How activations enter and leave a product of plain tensors, by the dim along which the weight is sharded: of
    outputs, every rank makes some and gives all inputs a part of their gradients; of inputs, the other way round."""

    def run(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        assert isinstance(x, DTensor)
        after: Any = {Shard(0): Shard(x.dim() - 1), Shard(1): Partial()}.get(placement, Replicate())
        given: Any = Partial() if placement == Shard(0) else x.placements[0]
        out = product(x.to_local(grad_placements=[given]))
        return DTensor.from_local(out, x.device_mesh, [after], run_check=False)

    return run


def quantised_linears(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The quantised projections of a rank's stages, by name."""
    return {
        name: module for model in modules for name, module in model.named_modules() if storage_of(module) is not None
    }


def filled_apart(linears: Mapping[str, nn.Module], shape: Model) -> set[str]:
    """The parameters that `fill_quantised` gives their values: codes, and the lengths of the rows they stand for."""
    drawn = shape.adapter is not None and shape.adapter.init_from is None
    parts = ("weight", ABSMAX, MAGNITUDE) if drawn else ("weight", ABSMAX)
    return {f"{name}.{part}" for name in linears for part in parts}


@torch.no_grad()
def fill_quantised(weights: Weights, linears: Mapping[str, nn.Module], shape: Model, seed: int) -> None:
    """Give quantised projections their values, one matrix after the other, so that no more than one is held in more
    bits; every rank quantises whole ones, since scales depend on all of a matrix."""
    if not linears:
        return  # what follows would build the whole model once more
    tensors, shards = {**weights.masters, **weights.frozen}, weights.shards() | dict(weights.frozen_shards)
    apart, pack = filled_apart(linears, shape), packed_weights(shape, seed)
    for name, linear in linears.items():
        packed = pack(f"{name}.weight", tensors[f"{name}.weight"].device)
        fill_scales(linear, packed)
        values = {"weight": packed.codes, ABSMAX: packed.absmax_OG}
        if f"{name}.{MAGNITUDE}" in apart & tensors.keys():
            values[MAGNITUDE] = packed.weight().norm(dim=1)
        for part, whole in values.items():
            if whole is not None:
                tensors[f"{name}.{part}"].copy_(whole[shards[f"{name}.{part}"].box()])
