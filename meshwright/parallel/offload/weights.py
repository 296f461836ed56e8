"""Offload on one device: masters, gradients and optimizer states in host memory, the working copy on the device.

Backward copies each gradient to the host as soon as it is computed and frees it; the optimizer updates the masters
there, some of them at a time, and their new working values are copied back while the next ones are updated.
"""

import os
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import Tensor, nn

from meshwright.job import Job
from meshwright.parallel.offload.host import TRAFFIC, CopyStream, host_buffer
from meshwright.parallel.offload.parameters import StreamedBlocks
from meshwright.parallel.shard_index import shard_index_of
from meshwright.parallel.weights import Updates, Weights, norm
from meshwright.ranks import ALONE, own_place

CHUNK_ELEMENTS = 2**26
"""Parameters updated at once: few enough that their copies start early, many enough to keep all cores busy."""
STAGED_ELEMENTS = 2**25
"""Parameters in one copy to the device."""


def offloads(job: Job, *what: str) -> bool:
    """Whether the job keeps any of these in host memory."""
    return any(each in job.memory.offload for each in what)


def share_cores() -> None:
    """Give a rank its share of the machine's cores for the update: launchers give each of several ranks a single
    one."""
    place = own_place() or ALONE
    if (ranks := place.local_size or 1) > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


class OffloadedWeights(Weights):
    """The weights of a model on one device, with masters in host memory.

    Gradients of several micro-batches are added on the device, where the sum so far is copied for it: the host only
    ever copies, and the sum is rounded as the job's gradient format says.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        master: torch.dtype,
        compute: torch.dtype,
        gradients: torch.dtype,
        *,
        stream: bool,
    ) -> None:
        """Take a model on the meta device; its working copy is on the device, or streamed to it block by block."""
        self.copies = CopyStream(device)
        self._streamed = StreamedBlocks(model, compute, device) if stream else None
        _materialise(model, compute, device, self._streamed)
        self._working = dict(model.named_parameters())
        trained = {name: p for name, p in self._working.items() if p.requires_grad}
        shards = {name: shard_index_of(p, tuple(p.shape)) for name, p in self._working.items()}
        self._shards = {name: shards[name] for name in trained}
        self.masters = {name: nn.Parameter(torch.empty(p.shape, dtype=master)) for name, p in trained.items()}
        homes = {} if self._streamed is None else self._streamed.homes
        self.frozen = {n: homes.get(n, p.detach()) for n, p in self._working.items() if not p.requires_grad}
        self.frozen_shards = {name: shards[name] for name in self.frozen}
        self._sums = _views(self.masters, gradients, device)
        self._norms: dict[str, Tensor] = {}
        """Of every gradient that has arrived in this step, on the device."""
        for name, parameter in trained.items():
            self.masters[name].grad_dtype = gradients
            parameter.register_post_accumulate_grad_hook(self._take(name))  # type: ignore[no-untyped-call]
        self._chunks = _chunks(self.masters)
        largest = max(sum(self.masters[name].numel() for name in chunk) for chunk in self._chunks)
        self._wide = torch.empty(largest if gradients != master else 0, dtype=master)
        longest = max(p.numel() for p in self.masters.values())
        self._staging = _Staging(self.copies, min(STAGED_ELEMENTS, longest), compute)

    def _take(self, name: str) -> Callable[[Tensor], None]:
        """A hook that moves a gradient from the device to the host."""
        sum_so_far, copies = self._sums[name], self.copies

        def hook(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            with copies.enqueued():
                if name in self._norms:
                    total = sum_so_far.to(copies.device, non_blocking=True).add_(gradient)
                    TRAFFIC.to_device_bytes += sum_so_far.nbytes
                else:
                    total = gradient.to(sum_so_far.dtype)
                sum_so_far.copy_(total, non_blocking=True)
                TRAFFIC.to_host_bytes += sum_so_far.nbytes
                self._norms[name] = norm(total, self.masters[name].dtype)
            copies.hold(gradient)
            if self._streamed is not None:
                self._streamed.gradient_made(name)

        return hook

    def start_micro_batch(self, last: bool) -> None:
        """Every gradient is added to what has arrived before, whatever the micro-batch."""
        if self._streamed is not None:
            self._streamed.free_leftovers()

    def collect_gradients(self) -> None:
        """Wait until the last gradients are on the host."""
        self.copies.drain()
        if self._streamed is not None:
            self._streamed.free_leftovers()
        for name in self._norms:
            self.masters[name].grad = self._sums[name]

    def refresh(self) -> None:
        """Derive the working copy again."""
        self._send(self.masters)
        self.copies.join()

    @torch.no_grad()
    def _send(self, names: Iterable[str]) -> None:
        homes = {} if self._streamed is None else self._streamed.homes
        for name in names:
            if name in homes:
                homes[name].copy_(self.masters[name])
            else:
                self._staging.send(self.masters[name].flatten(), self._working[name].detach().flatten())

    def _update(self, optimizer: Updates) -> None:
        """Let the optimizer update the masters, and send each group of them to the device while the next is updated."""
        gradients = {name: master.grad for name, master in self.masters.items()}
        for master in self.masters.values():
            master.grad = None
        for chunk in self._chunks:
            self._give(chunk, gradients)  # an optimizer skips what has no gradient
            optimizer.step()
            for name in chunk:
                self.masters[name].grad = None
            self._send(chunk)
        self.copies.join()

    def _give(self, names: Iterable[str], gradients: dict[str, Tensor | None]) -> None:
        """Give some masters their gradients, in the masters' format and in reused memory."""
        end = 0
        for name in names:
            master, gradient = self.masters[name], gradients[name]
            if gradient is None:
                continue
            if gradient.dtype != master.dtype:
                start, end = end, end + master.numel()
                gradient = self._wide[start:end].view(master.shape).copy_(gradient)
            master.grad_dtype = master.dtype
            master.grad = gradient

    def zero_gradients(self) -> None:
        """Forget all gradients; their memory stays."""
        self._norms.clear()
        for name, master in self.masters.items():
            master.grad = None
            master.grad_dtype = self._sums[name].dtype

    def square_sum(self) -> Tensor:
        """The squared gradient norm, on the device."""
        norms = [self._norms[name] for name in self.masters if name in self._norms]  # in a fixed order
        return torch.stack(norms).square().sum()


class _Staging:
    """Transfers new values to the device: cast into one of two page-locked buffers while the other is copied."""

    def __init__(self, copies: CopyStream, elements: int, compute: torch.dtype) -> None:
        self._copies = copies
        self._buffers = [host_buffer(elements, compute, copies.device) for _ in range(2)]
        self._marks: list[torch.cuda.Event | None] = [None, None]

    def send(self, master: Tensor, working: Tensor) -> None:
        """Start copying a flat master into the flat working copy."""
        elements = len(self._buffers[0])
        for start in range(0, len(master), elements):
            source, target = master[start : start + elements], working[start : start + elements]
            self._copies.wait(self._marks[0])
            values = self._buffers[0][: len(source)].copy_(source)
            with self._copies.enqueued():
                target.copy_(values, non_blocking=True)
            TRAFFIC.to_device_bytes += values.nbytes
            self._marks[0] = self._copies.mark()
            self._buffers.reverse()
            self._marks.reverse()


def _chunks(masters: dict[str, nn.Parameter]) -> list[list[str]]:
    """The masters in groups of about CHUNK_ELEMENTS."""
    chunks, held = list[list[str]](), 0
    for name, master in masters.items():
        if not chunks or held + master.numel() > CHUNK_ELEMENTS:
            chunks.append([])
            held = 0
        chunks[-1].append(name)
        held += master.numel()
    return chunks


def _materialise(model: nn.Module, compute: torch.dtype, device: torch.device, streamed: StreamedBlocks | None) -> None:
    """Allocate a meta-device model in its working format, so that masters never take device memory."""
    views = {} if streamed is None else streamed.views()

    def place(tensor: Tensor) -> Tensor:
        dtype = compute if isinstance(tensor, nn.Parameter) else tensor.dtype
        return views[id(tensor)] if id(tensor) in views else torch.empty_like(tensor, dtype=dtype, device=device)

    model._apply(place)  # type: ignore[no-untyped-call]


def _views(masters: dict[str, nn.Parameter], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """A tensor like each master in one page-locked buffer."""
    ends = list(accumulate(p.numel() for p in masters.values()))
    buffer = host_buffer(ends[-1], dtype, device)
    return {
        name: buffer[end - p.numel() : end].view(p.shape) for (name, p), end in zip(masters.items(), ends, strict=True)
    }
