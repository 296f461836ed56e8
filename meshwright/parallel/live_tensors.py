"""The weights a rank holds between and within passes: parameters and gradients, including those `fully_shard` keeps
internally."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.parallel.weights import Weights
from meshwright.torch_private.sharding import local_tensor, parameter_groups


def live_parameters(modules: Sequence[nn.Module], weights: Weights) -> Iterator[Tensor]:
    """Masters and what modules compute with, gathered copies while they exist; some share memory."""
    yield from (*weights.masters.values(), *weights.copied)
    for module in modules:  # `fully_shard` replaces the shard in its module by a gathered copy
        yield from (local_tensor(parameter) for parameter in module.parameters())


def live_gradients(modules: Sequence[nn.Module], weights: Weights) -> Iterator[Tensor]:
    """Gradients of masters and parameters, and sums that are not reduced yet; some share memory."""
    parameters: list[Tensor] = [*weights.masters.values(), *weights.copied]
    for module in modules:
        parameters += module.parameters()
        sums = (sharded.unsharded_accumulated_grad for sharded in _sharded(module))
        yield from (local_tensor(gradient) for gradient in sums if gradient is not None)
    yield from (local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None)


def _sharded(module: nn.Module) -> Iterator[Any]:
    """`fully_shard`'s record of each parameter."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            for group in parameter_groups(each):
                yield from group.fsdp_params
