"""Weights in fp8, made once for several micro-batches of a step, as they are and transposed: 2 bytes a parameter.

Between two updates a weight has one value, and so has its copy in fp8: casting it again with every micro-batch gives
the same bits. Copies are made outside of the blocks, which may be compiled, and forgotten with the step's last
micro-batch: an update, a loaded checkpoint or an evaluation never meets them. On one device they are made before the
first micro-batch. Where ranks share the states, the first one gathers the weights, block by block, while it computes:
it casts them as it needs them, and copies are made before the second.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.model.attention import Attention
from meshwright.model.feedforward import FeedForward
from meshwright.parallel.fp8 import Fp8Linear, cast_weight
from meshwright.parallel.fp8_scales import Cast


class WeightCasts:
    """The fp8 copies of a model's weights; their memory is kept from step to step, as compiled code and CUDA graphs
    expect."""

    def __init__(self, model: nn.Module, first: int) -> None:
        self._model, self._first = model, first
        self._made: dict[Fp8Linear, Cast] = {}

    def start(self, micro_batch: int) -> None:
        """Called before each micro-batch of a step, numbered from 1: makes all copies before the one it may."""
        if micro_batch == self._first:
            self._fill()

    def stop(self) -> None:
        """Called after the last micro-batch: from here on weights may change."""
        for linear in self._made:
            linear.cast = None

    @torch.no_grad()
    def _fill(self) -> None:
        for linears in linears_by_product(self._model):
            weights = [_local(linear.weight) for linear in linears]
            new = cast_weight(weights[0] if len(weights) == 1 else torch.cat(weights), linears[0].scales)
            held = self._made.setdefault(linears[0], new)
            if held is not new:
                for old, now in zip(held, new, strict=True):
                    old.copy_(now)
            linears[0].cast = held


def linears_by_product(model: nn.Module) -> list[list[Fp8Linear]]:
    """The linears whose weights one product reads, each group under its first; see `fused_projections`."""
    fused: dict[nn.Module, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, Attention | FeedForward) and module.fused:
            fused[module.fused_linears()[0]] = list(module.fused_linears())
    followers = {linear for group in fused.values() for linear in group[1:]}
    firsts = [module for module in model.modules() if isinstance(module, Fp8Linear) and module not in followers]
    return [[one for one in fused.get(first, [first]) if isinstance(one, Fp8Linear)] for first in firsts]


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
