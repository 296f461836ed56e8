"""Parameters in host memory on one device: a block's working copy is on the device only around its use.

The next block's parameters are copied to the device while one computes, forward and backward; what is outside the
blocks stays on the device. Where the model is sharded, torch does the same; see `offload_sharded`.
"""

from collections.abc import Callable
from functools import wraps
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.parallel.offload.host import TRAFFIC, CopyStream, host_buffer
from meshwright.torch_private.autograd import call_attribute, in_backward

ALIGNED_ELEMENTS = 64
"""Parameters in one buffer start at multiples of this, for the alignment of the kernels that read them."""


class StreamedBlocks:
    """The blocks of a model with their working copies in host memory."""

    def __init__(self, model: nn.Module, compute: torch.dtype, device: torch.device) -> None:
        self._copies = CopyStream(device)
        blocks = cast(nn.ModuleDict, model.layers)
        self._units = [_Unit(dict(block.named_parameters()), compute, self._copies) for block in blocks.values()]
        self.homes: dict[str, Tensor] = {}
        """Working values in host memory, by the parameters' names: what is written here is used from then on."""
        self._unit_of: dict[str, _Unit] = {}
        """By the names of parameters that get gradients."""
        for (key, block), unit in zip(blocks.items(), self._units, strict=True):
            for name, home in unit.homes.items():
                self.homes[f"layers.{key}.{name}"] = home
                if block.get_parameter(name).requires_grad:
                    self._unit_of[f"layers.{key}.{name}"] = unit
            # Around a compiled block as a whole: inside, it would be compiled too.
            attribute = call_attribute(block, "forward")
            setattr(block, attribute, self._around(getattr(block, attribute), unit))

    def views(self) -> dict[int, Tensor]:
        """Where the blocks' parameters are on the device while present, by the id of the parameter on meta."""
        return {place: view for unit in self._units for place, view in unit.views.items()}

    def free_leftovers(self) -> None:
        """Between micro-batches: a parameter without a gradient keeps its block on the device, where it would not
        follow an update."""
        for unit in self._units:
            unit.in_backward = False
            unit.release()

    def gradient_made(self, name: str) -> None:
        """A parameter is not used again in this backward; after the last one of a block, all of them are freed, unless
        some have no gradients: these are used until the backward comes to the block before."""
        if (unit := self._unit_of.get(name)) is not None and not unit.partly_trained:
            unit.without_gradient.discard(name)
            if not unit.without_gradient:
                unit.in_backward = False
                unit.release()

    def _around(self, function: Callable[..., Any], unit: "_Unit") -> Callable[..., Any]:
        place = self._units.index(unit)

        @wraps(function)
        def streaming(*args: Any, **kwargs: Any) -> Any:
            self._bring(place, place - 1 if unit.in_backward else place + 1)
            result = function(*args, **kwargs)
            if not in_backward():  # a recomputation comes here too, and backward still needs what it uses
                unit.release()
            return _Tell.apply(result, lambda: self._begin_backward(place))  # type: ignore[no-untyped-call]

        return streaming

    def _begin_backward(self, place: int) -> None:
        unit = self._units[place]
        unit.in_backward = True
        unit.without_gradient = {name for name, owner in self._unit_of.items() if owner is unit}
        if unit.partly_trained and place + 1 < len(self._units):
            self._units[place + 1].in_backward = False
            self._units[place + 1].release()
        self._bring(place, place - 1)

    def _bring(self, now: int, soon: int) -> None:
        """Make one block's parameters available on the device, and start copying another's."""
        self._units[now].fetch()
        self._units[now].arrive()
        if 0 <= soon < len(self._units):
            self._units[soon].fetch()


class _Unit:
    """One block's parameters: a host buffer, and a device buffer that has memory only while it is used."""

    def __init__(self, parameters: dict[str, nn.Parameter], compute: torch.dtype, copies: CopyStream) -> None:
        sizes = [-(-p.numel() // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS for p in parameters.values()]
        ends = list(accumulate(sizes))
        self._copies = copies
        self._host = host_buffer(ends[-1], compute, copies.device)
        self._there = torch.empty(ends[-1], dtype=compute, device=copies.device)
        self.homes, self.views = dict[str, Tensor](), dict[int, Tensor]()
        for (name, p), end, size in zip(parameters.items(), ends, sizes, strict=True):
            span = slice(end - size, end - size + p.numel())
            self.homes[name], self.views[id(p)] = self._host[span].view(p.shape), self._there[span].view(p.shape)
        self._there.untyped_storage().resize_(0)
        self._mark: torch.cuda.Event | None = None
        self.partly_trained = not all(p.requires_grad for p in parameters.values())
        self.in_backward = False
        self.without_gradient: set[str] = set()

    def fetch(self) -> None:
        """Start copying to the device, unless it is there or being copied."""
        storage = self._there.untyped_storage()
        if storage.size():
            return
        storage.resize_(self._host.nbytes)
        with self._copies.enqueued():
            self._there.data.copy_(self._host, non_blocking=True)  # .data: hidden from autograd
        self._mark = self._copies.mark()
        TRAFFIC.to_device_bytes += self._host.nbytes

    def arrive(self) -> None:
        """Make the computation wait for the copy."""
        if self._mark is not None:
            self._copies.join_at(self._mark)
            self._mark = None

    def release(self) -> None:
        """Free the device memory, for the stream that used it last."""
        self.arrive()
        self._there.untyped_storage().resize_(0)


class _Tell(torch.autograd.Function):
    """A tensor unchanged, with a callback when its gradient is computed and the block's backward is about to start."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tell: Callable[[], None]) -> Tensor:
        ctx.tell = tell
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        ctx.tell()
        return grads[0], None
