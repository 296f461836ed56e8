"""The copy of a state in host memory from which a checkpoint is written while training continues."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from meshwright.checkpoint.records import Part

ALIGNED_BYTES = 64

Allocate = Callable[[int], Tensor]
"""Allocates a flat buffer of the given size in host memory."""


class Staging:
    """One buffer, allocated at the first save and reused."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._buffer: Tensor | None = None

    @torch.no_grad()
    def stage(self, parts: Sequence[Part]) -> list[Part]:
        """Copies of the parts, which no later step changes."""
        sizes = [-(-part.values.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for part in parts]
        needed = sum(sizes)
        if self._buffer is None or len(self._buffer) < needed:
            self._buffer = None  # free it first: there may be no memory for both
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
