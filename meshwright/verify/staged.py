"""A process group whose collectives go through host memory, so that several ranks can share one GPU.

NCCL refuses two ranks on one device, and gloo crashes on CUDA tensors under `fully_shard`. For verifying layouts on one
card neither speed nor overlap matters: every collective here copies to the host, lets gloo do it, and copies back.
"""

# mypy: disable-error-code="override, assignment"
# Torch's stubs list several call forms of each collective; the ones it uses on groups written in Python are here.

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.torch_private.processes import finished_work, name_of_group

NAME = "staged"


def register() -> None:
    """Register the group with torch under NAME, once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return StagedGroup(store, rank, size, timeout)


class PythonGroup(dist.ProcessGroup):
    """A process group written in Python: torch makes such a group look up its own name."""

    @property
    def group_name(self) -> str:
        """Torch's name of this group."""
        return name_of_group(self)

    @property
    def pg_name(self) -> str:
        """The same, under torch's other name for it."""
        return self.group_name

    def _get_backend(self, device: torch.device) -> Any:
        """Torch 2.15 asks this whether messages can be coalesced; a group written in Python is its own backend."""
        return self


class StagedGroup(PythonGroup):
    """Gloo on host copies; collectives are finished when they return, messages between two ranks when waited for.

    A pipeline requests what it will need long before its peer sends it: a receive that blocked would wait forever.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        """As torch expects it."""
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._in_place(tensors, lambda host: self._gloo.allreduce(host, opts or dist.AllreduceOptions()))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            plain = dist.AllreduceOptions()
            plain.reduceOp = opts.reduceOp
            self.allreduce([tensor], plain)
        return finished(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._in_place(tensors, lambda host: self._gloo.broadcast(host, opts or dist.BroadcastOptions()))

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier(opts or dist.BarrierOptions()).wait()
        return finished(None)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        host_outputs = [[_host(tensor) for tensor in row] for row in outputs]
        self._gloo.allgather(host_outputs, [_host(tensor) for tensor in inputs]).wait()
        for row, host_row in zip(outputs, host_outputs, strict=True):
            _copy_back(row, host_row)
        return finished(outputs)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        parts = [torch.empty(source.shape, dtype=source.dtype) for _ in range(self.size())]
        self._gloo.allgather([parts], [_host(source)]).wait()
        output.copy_(torch.cat([part.flatten() for part in parts]).view(output.shape))
        return finished(output)

    all_gather_single = _allgather_base  # its name since torch 2.13

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, source in zip(outputs, inputs, strict=True):
            self._allgather_base(output, source)
        return finished(outputs)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        whole = _host(source).clone()
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        self._gloo.allreduce([whole], options).wait()
        output.copy_(whole.flatten().chunk(self.size())[self.rank()].view(output.shape))
        return finished(output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, source in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, source, opts)
        return finished(outputs)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        host_output = _host(output).clone()
        self._gloo.alltoall_base(host_output, _host(source), output_sizes, input_sizes, dist.AllToAllOptions()).wait()
        output.copy_(host_output)
        return finished(output)

    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> Any:
        return self._gloo.send([_host(tensor) for tensor in tensors], destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        host = [_host(tensor).clone() for tensor in tensors]
        return _Arriving(self._gloo.recv(host, source, tag), tensors, host)

    def _in_place(self, tensors: list[Tensor], run: Any) -> Any:
        host = [_host(tensor).clone() for tensor in tensors]
        run(host).wait()
        _copy_back(tensors, host)
        return finished(tensors)


class _Arriving(dist.Work):
    """A message in transit through the host, copied to its destination when it is waited for."""

    def __init__(self, work: Any, tensors: list[Tensor], host: list[Tensor]) -> None:
        super().__init__()
        self._work, self._tensors, self._host_tensors = work, tensors, host

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        _copy_back(self._tensors, self._host_tensors)
        return True


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _copy_back(tensors: list[Tensor], host: list[Tensor]) -> None:
    for tensor, values in zip(tensors, host, strict=True):
        tensor.detach().copy_(values)  # a pipeline receives into leaves of its graph


def finished(tensors: Any) -> Any:
    """A finished operation's handle. Gloo's keep their tensors as long as they live, NCCL's only until they are
    done."""
    first = tensors
    while isinstance(first, list | tuple):
        first = first[0] if first else None
    return finished_work(tensors if first is None or first.device.type == "cpu" else None)
