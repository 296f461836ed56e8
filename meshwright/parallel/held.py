"""What a rank holds of its weights between and within passes: parameters and gradients, those `fully_shard` keeps for
itself included."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.parallel.precision import Weights


def held_parameters(modules: Sequence[nn.Module], weights: Weights) -> Iterator[Tensor]:
    """Masters and what modules compute with, gathered copies while they stand; some share their memory."""
    yield from weights.masters.values()
    for module in modules:  # `fully_shard` has a gathered copy take the shard's place in its module
        yield from (_local(parameter) for parameter in module.parameters())


def held_gradients(modules: Sequence[nn.Module], weights: Weights) -> Iterator[Tensor]:
    """Gradients of masters and parameters, and sums that wait for their reduction; some share their memory."""
    parameters: list[Tensor] = list(weights.masters.values())
    for module in modules:
        parameters += module.parameters()
        sums = (sharded.unsharded_accumulated_grad for sharded in _sharded(module))
        yield from (_local(gradient) for gradient in sums if gradient is not None)
    yield from (_local(parameter.grad) for parameter in parameters if parameter.grad is not None)


def _sharded(module: nn.Module) -> Iterator[Any]:
    """What `fully_shard` knows of each parameter; private to torch, and alike in 2.11 and 2.13 but for the groups."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state: Any = each._get_fsdp_state()
            many = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has at most one
            groups = [state._fsdp_param_group] if many is None else many
            for group in groups:
                yield from () if group is None else group.fsdp_params


def _local(tensor: Tensor) -> Tensor:
    # not to_local(), which makes a node of the graph where gradients are recorded
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
