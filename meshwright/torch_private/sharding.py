"""What `fully_shard` and DTensor know of their tensors. torch 2.11 to 2.15."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = ["AsyncCollectiveTensor"]


def parameter_groups(module: FSDPModule) -> Iterator[Any]:
    """Torch's own groups of a unit's parameters; 2.11 has at most one."""
    state: Any = module._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)
    yield from (group for group in ([state._fsdp_param_group] if many is None else many) if group is not None)


def is_gathering(group: Any) -> bool:
    """Whether a group's parameters are being gathered."""
    return group._all_gather_result is not None


def shard_bytes(parameter: Any) -> int:
    """Bytes of this rank's shard of one of a group's `fsdp_params`."""
    return int(parameter._sharded_param_data.nbytes)


def shard_of(parameter: Any) -> Tensor:
    """This rank's shard of one of a group's `fsdp_params`, with the rows that fill it up to the size of the others."""
    shard: Tensor = parameter._sharded_param_data.view(parameter.padded_sharded_param_size)
    return shard


def module_of(parameter: Any) -> nn.Module:
    """The module that one of a group's `fsdp_params` belongs to."""
    module: nn.Module = parameter._module_info.module
    return module


def gather_as(parameter: Any, sent: Callable[[], Tensor], received: Callable[[Tensor, Tensor], None]) -> None:
    """Let one of a group's `fsdp_params`, not gathered now, be gathered in another format.

    `sent` gives this rank's share of the message, as long as its shard; `received` writes the whole parameter, padding
    included, out of all shares. Torch offers this to subclasses of tensors; a shard that the optimizer must see as a
    plain tensor can have the two methods as attributes.
    """
    shard, wide = parameter._sharded_local_tensor, None

    def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor, ...], None]:
        return (sent(),), None

    def after(shares: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        nonlocal wide
        if wide is None:
            wide = torch.empty(shares[0].shape, dtype=dtype, device=shares[0].device)
        with torch.no_grad(), _unsafe_preserve_version_counter(wide):
            received(shares[0], wide)
        shares[0].untyped_storage().resize_(0)  # torch makes it again for the next message
        return (wide, (wide,)) if out is None else None

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
    parameter._init_extensions()
    parameter.all_gather_outputs = []
    if hasattr(parameter, "_unsharded_param"):
        del parameter._unsharded_param


def widen_gradients(module: nn.Module) -> None:
    """Add gradients to those of earlier micro-batches in the format of their reduction, and convert the first ones.

    Torch does so after a backward that its hooks see. Half a backward calls none.
    """
    units = (unit for unit in module.modules() if isinstance(unit, FSDPModule))
    for group in (group for unit in units for group in parameter_groups(unit)):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def gather_in_background(module: FSDPModule) -> None:
    """Let units gather their parameters without waiting, on a CPU too."""
    module._set_unshard_async_op(True)


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's own part; not to_local(), which adds a node to the autograd graph."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec_of(tensor: Tensor) -> Any:
    """A DTensor's placement on its mesh; None for other tensors."""
    return tensor._spec if isinstance(tensor, DTensor) else None
