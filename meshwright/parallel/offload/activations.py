"""Activations in host memory: what a block saves for backward is copied out as soon as it is saved, and copied back one
block ahead of its use.

With full recomputation a block saves only its input, and only that is copied; with segments, a segment's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, cast
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from meshwright.model import Decoder
from meshwright.parallel.offload.host import SMALL_BYTES, TRAFFIC, CopyStream, host_buffer
from meshwright.torch_private.autograd import base_of, call_attribute
from meshwright.torch_private.sharding import local_tensor, spec_of

Key = tuple[int, torch.dtype, int]


def offload_activations(model: nn.Module, device: torch.device) -> None:
    """Let every block of a model, or every segment that is recomputed, keep what it saves for backward in host
    memory."""
    activations = _Activations(device)
    if isinstance(model, Decoder) and model.segments is not None:
        run = model.run_segment
        runs = {names[0]: activations.around(run, first=place == 0) for place, names in enumerate(model.segments)}
        model.run_segment = lambda names, *given: runs[names[0]](names, *given)  # type: ignore[method-assign]
        return
    for place, block in enumerate(cast(nn.ModuleDict, model.layers).values()):
        # Around a compiled block as a whole: inside, it would be compiled too.
        attribute = call_attribute(block, "forward")
        setattr(block, attribute, activations.around(getattr(block, attribute), first=place == 0))


class _Activations:
    """What the blocks of one model have in host memory, and the stream that copies it out and back."""

    def __init__(self, device: torch.device) -> None:
        self.copies = CopyStream(device)
        # Small ones would cost more than they free; on a CPU, which gains nothing, all take the tested path.
        self._least_bytes = SMALL_BYTES if device.type == "cuda" else 0
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._latest: _Visit | None = None
        self._in_use: list[_Visit] = []
        """The block whose backward runs, and the one before it, which is being copied back."""

    def around(self, function: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
        """A block's forward with its saved tensors kept here."""

        @wraps(function)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            before = None if first or self._latest is None else ref(self._latest)
            visit = self._latest = _Visit(before)
            with saved_tensors_hooks(partial(self._pack, visit), self._unpack):
                result = function(*args, **kwargs)
            visit.seen.clear()
            return result

        return keeping

    def _pack(self, visit: "_Visit", saved: Tensor) -> Any:
        tensor = local_tensor(saved)
        if not self._travels(saved, tensor):
            return saved
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.dtype, tensor.numel())  # dense, so that this says which memory it is
        if key not in visit.seen:
            visit.seen[key] = (self._send(visit, tensor), tensor)  # kept: its address must not become another's
        return _Packed(visit.seen[key][0], tensor.shape, tensor.stride(), spec_of(saved))

    def _travels(self, saved: Tensor, tensor: Tensor) -> bool:
        """Whether a saved tensor is an activation worth moving; weights stay, and so do tensors with gaps in memory."""
        base = base_of(saved)
        return (
            tensor.is_floating_point()
            and tensor.device.type == self.copies.device.type
            and tensor.nbytes >= max(1, self._least_bytes)
            and not isinstance(base, nn.Parameter)
            and _is_dense(tensor)
        )

    def _send(self, visit: "_Visit", tensor: Tensor) -> "_Kept":
        """Start copying a tensor's memory out."""
        flat = tensor.as_strided((tensor.numel(),), (1,))
        free = self._free.setdefault((flat.numel(), flat.dtype), [])
        host = free.pop() if free else host_buffer(flat.numel(), flat.dtype, self.copies.device)
        with self.copies.enqueued():
            host.copy_(flat, non_blocking=True)
        TRAFFIC.to_host_bytes += host.nbytes
        self.copies.hold(tensor)
        kept = _Kept(visit, host)
        visit.kept.add(kept)
        finalize(kept, free.append, host)
        return kept

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Packed):
            return cast(Tensor, packed)
        visit = packed.kept.visit
        if visit not in self._in_use[:1]:
            self._begin(visit)
        tensor = self._arrived(packed.kept).as_strided(packed.shape, packed.stride)
        if packed.spec is None:
            return tensor
        return DTensor(tensor, packed.spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _begin(self, visit: "_Visit") -> None:
        """A block's backward starts: free the last block's tensors, and copy back this one's and the next one's."""
        self.copies.settle()
        before = None if visit.before is None else visit.before()
        using = [visit] if before is None else [visit, before]
        for other in self._in_use:
            if other not in using:
                for kept in other.kept:
                    if kept.back is not None:
                        self._arrived(kept)
                        kept.back = None
        self._in_use = using
        for each in using:
            for kept in list(each.kept):
                if kept.back is None:
                    self._fetch(kept)

    def _arrived(self, kept: "_Kept") -> Tensor:
        """A tensor's memory on the device, which the computation may now use."""
        if kept.back is None:
            self._fetch(kept)
        if kept.arrived is not None:
            self.copies.join_at(kept.arrived)
            kept.arrived = None
        assert kept.back is not None
        return kept.back

    def _fetch(self, kept: "_Kept") -> None:
        # Its memory belongs to the compute stream, which waits for the copy before the first use and frees it after the
        # last.
        kept.back = torch.empty_like(kept.host, device=self.copies.device)
        with self.copies.enqueued():
            kept.back.copy_(kept.host, non_blocking=True)
        kept.arrived = self.copies.mark()
        TRAFFIC.to_device_bytes += kept.host.nbytes


@dataclass(eq=False)
class _Kept:
    """One tensor's memory on the host, and on the device while a backward uses it."""

    visit: "_Visit"
    host: Tensor
    back: Tensor | None = None
    arrived: torch.cuda.Event | None = None


@dataclass(eq=False)
class _Visit:
    """One pass of one micro-batch through one block; it lives as long as anything it saved."""

    before: "ref[_Visit] | None"
    """The pass through the block before, whose backward comes next."""
    kept: "WeakSet[_Kept]" = field(default_factory=WeakSet)
    seen: dict[Key, tuple[_Kept, Tensor]] = field(default_factory=dict)
    """What was saved so far, until the pass ends: several operations often save the same."""


@dataclass(frozen=True, eq=False)
class _Packed:
    """What autograd holds instead of a saved tensor."""

    kept: _Kept
    shape: torch.Size
    stride: tuple[int, ...]
    spec: Any
    """A distributed tensor's placement; None for a plain one."""


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill contiguous memory without gaps or repeats, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
