"""A distinct call, issued on a group of one rank through the methods that torch's own functions call.

A group of one returns what it is given, which is compared. A message goes to the rank itself, in a batch with its
receive: NCCL would wait for a single one forever.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from meshwright.torch_private.processes import coalesced, premultiplied_sum, supports_coalescing
from meshwright.verify.collectives.distinct import MESSAGES, Call
from meshwright.verify.collectives.record import Spec

Issue = Callable[[Any, Call, list[Tensor], list[Tensor]], Any]


ERRORS = (RuntimeError, ValueError, TypeError)
"""What torch and the library raise for arguments that they do not accept."""


class Refused(Exception):
    """A call was not accepted, or returned something else than it was given."""


def why_not(group: dist.ProcessGroup, call: Call, device: torch.device) -> str | None:
    """Why a rank cannot issue a call alone; None if it can."""
    if call.kind == MESSAGES:
        return None if supports_coalescing(group, device) else "this library does not send to the same rank"
    if call.kind not in _ISSUES:
        return f"{call.kind} has no form for one rank"
    return None


def issue(group: dist.ProcessGroup, call: Call, device: torch.device) -> None:
    """Issue a call with tensors of its own, wait for it and compare what it returns."""
    inputs = [_filled(spec, device) for spec in call.inputs]
    outputs = [_empty(spec, device) for spec in (call.inputs if call.kind == MESSAGES else call.outputs)]
    given = [tensor.clone() for tensor in inputs]
    try:
        if call.kind == MESSAGES:
            with coalesced(group, device):
                for source, target in zip(inputs, outputs, strict=True):
                    group.send([source], 0, 0)
                    group.recv([target], 0, 0)
        elif (work := _ISSUES[call.kind](group, call, inputs, outputs)) is not None:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except ERRORS as error:
        raise Refused(first_line(error)) from error
    for before, after in zip(given, outputs or inputs, strict=True):
        if not torch.equal(_bytes(before), _bytes(after)):
            raise Refused("it did not return what it was given")


def first_line(error: Exception) -> str:
    """The first line of an error's text that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# ---- Each kind ----


def _all_reduce(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return group.allreduce(inputs, _options(c10d.AllreduceOptions, call))


def _all_reduce_coalesced(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return group.allreduce_coalesced(inputs, _options(c10d.AllreduceCoalescedOptions, call))


def _broadcast(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return group.broadcast(inputs, _options(c10d.BroadcastOptions, call))


def _reduce(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return group.reduce(inputs, _options(c10d.ReduceOptions, call))


def _all_gather(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return group.allgather([outputs], inputs, _options(AllgatherOptions, call))


def _all_gather_into_tensor(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    method = _newest(group, "all_gather_single", "_allgather_base")
    return method(outputs[0], inputs[0], _options(AllgatherOptions, call))


def _all_gather_coalesced(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    method = _newest(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    return method(outputs, inputs, _options(AllgatherOptions, call))


def _reduce_scatter(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return group.reduce_scatter(outputs, [inputs], _options(c10d.ReduceScatterOptions, call))


def _reduce_scatter_tensor(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    method = _newest(group, "reduce_scatter_single", "_reduce_scatter_base")
    return method(outputs[0], inputs[0], _options(c10d.ReduceScatterOptions, call))


def _reduce_scatter_coalesced(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    method = _newest(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    return method(outputs, inputs, _options(c10d.ReduceScatterOptions, call))


def _all_to_all(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return group.alltoall(outputs, inputs, _options(c10d.AllToAllOptions, call))


def _all_to_all_single(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    received, sent = ([outputs[0].shape[0]], [inputs[0].shape[0]]) if call.splits else ([], [])
    method = _newest(group, "all_to_all_single", "alltoall_base")
    return method(outputs[0], inputs[0], received, sent, _options(c10d.AllToAllOptions, call))


def _gather(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return group.gather([outputs], inputs, _options(c10d.GatherOptions, call))


def _scatter(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return group.scatter(outputs, [inputs], _options(c10d.ScatterOptions, call))


def _barrier(group: Any, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    return dist.barrier(group)


_ISSUES: dict[str, Issue] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_into_tensor_coalesced": _all_gather_coalesced,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}


def _newest(group: Any, *names: str) -> Any:
    """A method by the first of its names that this torch knows: 2.13 renames some and warns about the old names."""
    return getattr(group, next(name for name in names if hasattr(group, name)))


def _options(of: Any, call: Call) -> Any:
    options = of()
    if hasattr(options, "asyncOp"):
        options.asyncOp = call.asynchronous
    if hasattr(options, "rootRank"):
        options.rootRank = 0
    if call.reduce is not None:
        options.reduceOp = _operation(call.reduce)
    return options


def _operation(name: str) -> Any:
    if name == "PREMUL_SUM":
        return premultiplied_sum(1.0)
    operation = getattr(dist.ReduceOp, name, None)
    if operation is None:
        raise ValueError(f"torch has no reduce operation {name}")
    return operation


# ---- Its tensors ----


def _filled(spec: Spec, device: torch.device) -> Tensor:
    tensor = _empty(spec, device)
    tensor.copy_((torch.arange(spec.numel, device=device) % 120 + 1).view(spec.shape))
    return tensor


def _empty(spec: Spec, device: torch.device) -> Tensor:
    """Zeros, strided if the recorded tensor was not contiguous."""
    dtype = getattr(torch, spec.dtype)
    if spec.contiguous:
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    return torch.zeros(*spec.shape, 2, dtype=dtype, device=device)[..., 0]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
