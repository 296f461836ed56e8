"""A process group of which only one rank exists: every collective completes at once, with plausible contents.

What the other ranks would have sent is made from what this rank has: finite, of the right scale, written on the
caller's current stream and without memory of its own. No number that comes out means anything.

all-gather      every rank's share is this rank's own
reduce-scatter  this rank's part of its own input, as if the others had added independent values of the same scale
all-reduce      likewise: a sum of n grows by √n. A sum that grew by n would grow by √n too much in every layer of a
                tensor-parallel model. Counts and votes, which are integers or float64, do grow by n; MAX stays
all-to-all      integers: what this rank keeps for itself arrives from everyone, so that a rank's experts get as many
                tokens from every other rank as from this one; other numbers: this rank's own rows, repeated
broadcast       this rank's own value stays, objects too
receive         small random numbers, different in every row, so that tokens do not all go to the same expert; of
                integers ones, since torch's pipeline votes whether shapes are known
"""

# mypy: disable-error-code="override, assignment"

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.rehearse.copies import COPIES
from meshwright.torch_private.processes import finished_work, replace_object_messages
from meshwright.verify.staged import PythonGroup, finished

NAME = "rehearsed"
SPREAD = 0.035
"""Received numbers are uniform between ± this: their deviation is 0.02, which models draw their first embeddings with,
and gradients of that size overflow no format."""


def register() -> None:
    """Register the group with torch under NAME, once, and let objects that are broadcast stay as they are."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
        # The group sees only bytes; which object this rank would have sent is known only to the call.
        replace_object_messages(_keep_objects, _first_of_own)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return RehearsedGroup(store, rank, size, timeout)


def _keep_objects(object_list: list[Any], *given: Any, **named: Any) -> None:
    """In place of `broadcast_object_list`."""


def _first_of_own(output: list[Any], given: list[Any] | None = None, *rest: Any, **named: Any) -> None:
    """In place of `scatter_object_list`: only the root has a list to take this rank's object from."""
    if given:
        output[0] = given[min(dist.get_rank(), len(given) - 1)]


class RehearsedGroup(PythonGroup):
    """One rank of a group whose other ranks do not exist."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._generators: dict[torch.device, torch.Generator] = {}

    def getBackendName(self) -> str:
        """As torch expects it."""
        return NAME

    @COPIES.around
    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            self._sum(tensor, opts)
        return finished(tensors)

    allreduce_coalesced = allreduce

    @torch.no_grad()
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return finished(tensors)

    def barrier(self, opts: Any = None) -> Any:
        return finished_work(None)

    @COPIES.around
    @torch.no_grad()
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for row, source in zip(outputs, inputs, strict=True):
            for output in row:
                output.copy_(source)
        return finished(outputs)

    @COPIES.around
    @torch.no_grad()
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for row in outputs:
            for output, source in zip(row, inputs, strict=True):
                output.copy_(source)
        return finished(outputs)

    @COPIES.around
    @torch.no_grad()
    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        # Where the source is this rank's place in the output it is written over itself.
        output.view(self.size(), -1).copy_(source.reshape(1, -1).expand(self.size(), -1))
        return finished(output)

    all_gather_single = _allgather_base  # its name since torch 2.13

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, source in zip(outputs, inputs, strict=True):
            self._allgather_base(output, source)
        return finished(outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    @COPIES.around
    @torch.no_grad()
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        for output, row in zip(outputs, inputs, strict=True):
            output.copy_(row[self.rank()])
            self._sum(output, opts)
        return finished(outputs)

    @COPIES.around
    @torch.no_grad()
    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        output.copy_(source.reshape(self.size(), -1)[self.rank()].view(output.shape))
        self._sum(output, opts)
        return finished(output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, source in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, source, opts)
        return finished(outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    @COPIES.around
    @torch.no_grad()
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for place, output in enumerate(outputs):
            source = inputs[place] if output.is_floating_point() else inputs[self.rank()]
            self._fill_rows(output.view(-1), source.reshape(-1))
        return finished(outputs)

    @COPIES.around
    @torch.no_grad()
    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        if output.is_floating_point() or input_sizes:
            self._fill_rows(output, source)
        else:
            own = source.reshape(self.size(), -1)[self.rank()]
            output.view(self.size(), -1).copy_(own.expand(self.size(), -1))
        return finished(output)

    all_to_all_single = alltoall_base

    @COPIES.around
    @torch.no_grad()
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for row in outputs:  # empty but on the root
            for output in row:
                output.copy_(inputs[0])
        return finished(outputs)

    @COPIES.around
    @torch.no_grad()
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        for place, output in enumerate(outputs):
            if inputs:
                output.copy_(inputs[place][self.rank()])
            else:
                self._draw(output)
        return finished(outputs)

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> Any:
        return finished(tensors)

    @COPIES.around
    @torch.no_grad()
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        for tensor in tensors:
            self._draw(tensor)
        return finished(tensors)

    @torch.no_grad()
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        return self.recv(tensors, 0, tag)

    def _sum(self, tensor: Tensor, opts: Any) -> None:
        """In place, what this rank's value becomes in a sum over all ranks."""
        if opts is not None and str(opts.reduceOp.op).rpartition(".")[2] != "SUM":
            return
        counts = tensor.dtype == torch.float64 or not tensor.is_floating_point()
        tensor.detach().mul_(self.size() if counts else math.sqrt(self.size()))

    def _fill_rows(self, output: Tensor, source: Tensor) -> None:
        """This rank's own rows again and again."""
        if not len(source):
            self._draw(output)
            return
        for start in range(0, len(output), len(source)):
            rows = output[start : start + len(source)]
            rows.copy_(source[: len(rows)])

    def _draw(self, tensor: Tensor) -> None:
        tensor = tensor.detach()  # a pipeline receives into leaves of its graph
        if not tensor.is_floating_point():
            tensor.fill_(1)
            return
        if tensor.device not in self._generators:  # its own: dropout and order stay those of the rank
            self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self.rank())
        tensor.uniform_(-SPREAD, SPREAD, generator=self._generators[tensor.device])
