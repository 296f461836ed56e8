"""What `fully_shard` and DTensor know of their tensors. torch 2.11 to 2.15."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
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


def gather_in_background(module: FSDPModule) -> None:
    """Let units gather their parameters without waiting, on a CPU too."""
    module._set_unshard_async_op(True)


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's own part; not to_local(), which adds a node to the autograd graph."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec_of(tensor: Tensor) -> Any:
    """A DTensor's placement on its mesh; None for other tensors."""
    return tensor._spec if isinstance(tensor, DTensor) else None
