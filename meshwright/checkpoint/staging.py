"""The copy of a state in host memory from which a checkpoint is written while training goes on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from meshwright.checkpoint.records import Part

ALIGNED_BYTES = 64

Allocate = Callable[[int], Tensor]
"""Makes a flat buffer of so many bytes in host memory."""


class Staging:
    """One buffer that is made at the first save and used again and again."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._buffer: Tensor | None = None

    @torch.no_grad()
    def stage(self, parts: Sequence[Part]) -> list[Part]:
        """The same parts with values of their own, which no later step changes."""
        sizes = [-(-part.values.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for part in parts]
        needed = sum(sizes)
        if self._buffer is None or len(self._buffer) < needed:
            self._buffer = None  # let go first: there may be no room for both
            self._buffer = self._allocate(needed)
        staged = []
        for part, start in zip(parts, accumulate(sizes, initial=0), strict=False):
            raw = self._buffer[start : start + part.values.nbytes]
            copy = raw.view(part.values.dtype).view(part.values.shape)
            copy.copy_(part.values.detach(), non_blocking=True)
            staged.append(replace(part, values=copy))
        for device in {part.values.device for part in parts if part.values.is_cuda}:
            torch.cuda.synchronize(device)
        return staged
