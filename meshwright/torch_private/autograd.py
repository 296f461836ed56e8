"""The state of a backward, and operations observed one by one. torch 2.11 to 2.15."""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import SAC_IGNORED_OPS

__all__ = ["TorchDispatchMode", "is_traceable_wrapper_subclass", "tree_iter"]

Forward = TypeVar("Forward", bound=Callable[..., Any])


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def takes_context(forward: Forward) -> Forward:
    """For an autograd function whose forward has a starred parameter. Where no gradient is needed the compiler asks the
    signature whether there is a context: given as many arguments as parameters, it takes it that there is none. Two
    tensors for the starred parameter are as many, so the signature told is one that no call matches."""
    forward.__signature__ = Signature([Parameter("ctx", Parameter.POSITIONAL_ONLY)])  # type: ignore[attr-defined]
    return forward


def let_sharded_modules_be_recomputed() -> None:
    """Let selective recomputation contain modules of `fully_shard`, whose profiler ranges differ from the forward's."""
    profiler = torch.ops.profiler
    SAC_IGNORED_OPS.update(
        {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}
    )


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Call a function when the current backward has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that another is a view of, or the tensor itself."""
    base = tensor._base if tensor._is_view() else tensor
    assert base is not None
    return base


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has while this one exists."""
    return int(storage._cdata)


def storage_of_reference(reference: Any) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if it still exists."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


def call_attribute(module: nn.Module, plain: str) -> str:
    """The attribute that calling a module invokes: the compiled call, or `plain`."""
    return plain if module._compiled_call_impl is None else "_compiled_call_impl"
