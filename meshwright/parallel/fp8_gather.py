"""Weights of the blocks gathered in fp8: half the bytes of a message, and not one bit of a product changed.

A weight's fp8 numbers depend on nothing but the weight and the largest number in it. So each rank can round its own
rows, once it knows the largest of all rows: one small message after every update brings it, for all weights. What
arrives is widened to bf16, from which the product rounds again to the very same fp8 numbers: the largest, a bf16
number, comes back as it was, and so does the scale; and bf16 errs by less than half of the distance between two fp8
numbers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from meshwright.hardware.torch_versions import HAS_TRITON
from meshwright.parallel.fp8 import FORWARD, narrowed, scale_of_largest
from meshwright.parallel.fp8_casts import linears_by_product
from meshwright.torch_private.sharding import gather_as, module_of, parameter_groups, shard_of

WORKING = torch.bfloat16
"""The working copy's format, from which products round."""


class Fp8Gathers:
    """The scales with which a rank rounds its shards of a model's weights before it sends them."""

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self._group = group
        parameters = _weights(model)
        # Weights that one product reads share a scale.
        self._products = [[parameters[linear] for linear in linears] for linears in linears_by_product(model)]
        self._scales: list[Tensor] = []
        for place, together in enumerate(self._products):
            for parameter in together:
                self._gather(parameter, place)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """New scales, after the shards have changed; called on all ranks that share them."""
        largest = torch.stack([_largest([shard_of(one) for one in together]) for together in self._products])
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        self._scales = list(scale_of_largest(largest.to(WORKING).float(), FORWARD))

    def _gather(self, parameter: Any, place: int) -> None:
        def sent() -> Tensor:
            return narrowed(shard_of(parameter).to(WORKING), self._scales[place], FORWARD).view(torch.uint8)

        def received(shares: Tensor, out: Tensor) -> None:
            widen(shares.view(FORWARD), self._scales[place], out)

        gather_as(parameter, sent, received)


def widen(narrow: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write narrow × scale to `out`."""
    if narrow.is_cuda and HAS_TRITON:
        from meshwright.parallel.fp8_kernel import launch_widen

        launch_widen(narrow, scale, out)
    else:
        out.copy_(narrow.float() * scale)


def _weights(model: nn.Module) -> dict[nn.Module, Any]:
    """What `fully_shard` knows of each module's weight."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in parameter_groups(unit)]
    matrices = [one for group in groups for one in group.fsdp_params if one.sharded_param.dim() == 2]
    return {module_of(one): one for one in matrices}


def _largest(shards: list[Tensor]) -> Tensor:
    """The largest number of some shards, without a copy of them."""
    return torch.stack([torch.stack(shard.aminmax()) for shard in shards]).abs().amax()
