"""ZeRO stages with `fully_shard`: what is sharded, when gradients are reduced, when parameters are gathered.

0  replicated: gradients all-reduced once a step
1  optimizer states sharded: gradients whole until the last micro-batch, reduced once a step
2  gradients sharded too: reduced every micro-batch
3  parameters sharded too: gathered for each use and freed again
Averaging by the framework is off: the loss is already divided by the step's count of valid tokens.
"""

import warnings
from collections import Counter
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.job.devices import Layout
from meshwright.model.encoder import encoder_blocks
from meshwright.model.moe import MixtureOfExperts
from meshwright.parallel.fp8_gather import Fp8Gathers
from meshwright.parallel.shard_index import shard_index_of
from meshwright.parallel.weights import Weights, move_gradient_to
from meshwright.torch_private.sharding import gather_in_background, local_tensor


def apply_zero(
    model: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    compute: torch.dtype,
    master: torch.dtype,
    gradients: torch.dtype,
    offload: OffloadPolicy,
    whole: set[nn.Parameter],
) -> None:
    """Shard a model, block by block, in place; working copies are in `compute`, gradients reduced in `gradients`.

    The parameters in `whole` stay as they are on every rank.
    """
    # Torch warns about views that an in-place operation would corrupt; nothing here modifies a module's result in
    # place.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    low = compute if compute != master else None
    # Inputs are not cast: hidden states already are in the compute format and rotary tables must not be.
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=gradients if low else None, cast_forward_inputs=False)
    settings: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload, "ignored_params": whole}
    reshard = layout.zero_stage == 3
    # Where gradients are compressed between replicas, torch handles the shards only; see `compression`.
    data_mesh = mesh["replicas", "shards"] if layout.compress == "none" else mesh["shards"]
    blocks = [*encoder_blocks(model), *cast(nn.ModuleDict, model.layers).values()]
    if expert_mesh is not None:
        # Experts are sharded apart from the rest of their block: over other ranks, since each rank has only some.
        data = expert_mesh["replicas", "expert_shards"] if layout.compress == "none" else expert_mesh["expert_shards"]
        for experts in _experts(blocks).values():
            fully_shard(experts, mesh=data, reshard_after_forward=reshard, **settings)
    for unit in [*blocks, *_ends(model, blocks)]:
        fully_shard(unit, mesh=data_mesh, reshard_after_forward=reshard, **settings)
    fully_shard(model, mesh=data_mesh, reshard_after_forward=False, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if mesh.device_type == "cpu" and layout.prefetch:
        # On a GPU gathers run in their own stream; without streams only an asynchronous call lets them run ahead.
        gather_in_background(cast(FSDPModule, model))
    _prefetch(blocks, layout.prefetch)


def _ends(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Large modules outside the blocks, sharded separately; a table used at both ends stays with the root."""
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [child for child in model.children() if child is not model.layers]
    uses = Counter(id(p) for child in outside for p in child.parameters())
    return [
        child
        for child in outside
        if any(p.dim() > 1 for p in child.parameters())
        and all(uses[id(p)] == 1 and id(p) not in inside for p in child.parameters())
    ]


def _experts(blocks: list[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The weights of the experts of each block that has any."""
    return {block: m.experts for block in blocks for m in block.modules() if isinstance(m, MixtureOfExperts)}


def _prefetch(blocks: list[nn.Module], depth: int) -> None:
    """Gather the next `depth` blocks while one computes, forward and backward; a block's experts are used after the
    rest of it in forward and before it in backward."""
    experts = _experts(blocks)
    for place, block in enumerate(blocks):
        after, before = blocks[place + 1 : place + 1 + depth], reversed(blocks[max(0, place - depth) : place])
        # Torch gathers one ahead in backward unless told what to gather: given only itself, a block gathers nothing.
        forward = [unit for other in after for unit in (other, *_of(experts, other))]
        backward = [unit for other in before for unit in (*_of(experts, other), other)]
        own = _of(experts, block) if depth else []
        sharded = cast(FSDPModule, block)
        sharded.set_modules_to_forward_prefetch(cast(list[FSDPModule], own + forward))
        # A block that is recomputed needs its experts as its forward had them: gathered before it began.
        sharded.set_modules_to_backward_prefetch(cast(list[FSDPModule], own + backward if depth else [block]))
        for unit in _of(experts, block):
            cast(FSDPModule, unit).set_modules_to_forward_prefetch([])
            cast(FSDPModule, unit).set_modules_to_backward_prefetch([cast(FSDPModule, unit)])


def _of(experts: dict[nn.Module, nn.Module], block: nn.Module) -> list[nn.Module]:
    return [experts[block]] if block in experts else []


class ShardedWeights(Weights):
    """A rank's shards of the masters, as plain tensors that share memory with what `fully_shard` holds.

    Working copies are derived from them at every gather, which among the ranks of `fp8_ranks` is in fp8. The optimizer
    works on plain tensors because every update it makes is elementwise: going through DTensor would only add its
    dispatch to each of them.
    """

    def __init__(
        self,
        model: nn.Module,
        zero: int,
        shapes: dict[str, tuple[int, ...]],
        gradients: torch.dtype,
        fp8_ranks: ProcessGroup | None = None,
    ) -> None:
        self._root = cast(FSDPModule, model)
        self._zero = zero
        self._root.unshard()  # torch allocates the shards' storage at the first use
        self._root.reshard()
        self._fp8_gathers = None if fp8_ranks is None else Fp8Gathers(model, fp8_ranks)
        self._parameters = {name: cast(DTensor, p) for name, p in model.named_parameters() if p.requires_grad}
        untrained = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self.frozen = {name: local_tensor(p.detach()) for name, p in untrained.items()}
        self.frozen_shards = {name: shard_index_of(p, shapes[name]) for name, p in untrained.items()}
        self._shards = {name: shard_index_of(p, shapes[name]) for name, p in self._parameters.items()}
        shards = {name: cast(DTensor, p.detach()).to_local() for name, p in self._parameters.items()}
        self.masters = {name: nn.Parameter(shard) for name, shard in shards.items()}
        self._moved = any(gradients != master.dtype for master in self.masters.values())
        if self._moved:  # torch returns reduced gradients in the parameters' format, whatever it reduced them in
            for name, parameter in self._parameters.items():
                self.masters[name].grad_dtype = gradients
                parameter.register_post_accumulate_grad_hook(move_gradient_to(self.masters[name]))  # type: ignore[no-untyped-call]

    def start_micro_batch(self, last: bool) -> None:
        """Set when gradients are reduced and parameters freed, by zero stage."""
        self._root.set_is_last_backward(last)
        self._root.set_requires_gradient_sync(last or self._zero >= 2)
        self._root.set_requires_all_reduce(last)
        self._root.set_reshard_after_backward(last or self._zero == 3)

    def collect_gradients(self) -> None:
        """Give the reduced gradients to the masters."""
        if self._moved:
            return  # as they came
        for name, parameter in self._parameters.items():
            gradient = cast(DTensor | None, parameter.grad)
            self.masters[name].grad = None if gradient is None else gradient.to_local()

    def refresh(self) -> None:
        """Free what an evaluation has left gathered, which the masters no longer are, and agree on new scales."""
        for module in cast(nn.Module, self._root).modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if self._fp8_gathers is not None:
            self._fp8_gathers.refresh()

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self.masters[name].grad = None
