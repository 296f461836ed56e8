"""The copy of a state in host memory from which a checkpoint is written while training continues."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.checkpoint.records import Part

ALIGNED_BYTES = 64
PIECE_BYTES = 512 * 2**20
"""Memory is allocated in pieces of at least this size: page-locking one blocks the GPU's driver only for a moment."""

Allocate = Callable[[int], Tensor]
"""Allocates a flat buffer of the given size in host memory."""


class Staging:
    """Buffers in host memory, allocated once and reused."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._pieces: list[Tensor] = []

    def prepare(self, sizes: Sequence[int]) -> None:
        """Allocate the memory for parts of these sizes in bytes."""
        _, pieces = _places(sizes)
        for number, size in enumerate(pieces):
            if number == len(self._pieces):
                self._pieces.append(self._allocate(size))
            elif len(self._pieces[number]) < size:
                self._pieces[number] = torch.empty(0)  # free it first: there may be no memory for both
                self._pieces[number] = self._allocate(size)

    @torch.no_grad()
    def stage(self, parts: Sequence[Part]) -> list[Part]:
        """Copies of the parts, which no later step changes."""
        sizes = [part.values.nbytes for part in parts]
        self.prepare(sizes)
        staged = []
        for part, (number, start) in zip(parts, _places(sizes)[0], strict=True):
            raw = self._pieces[number][start : start + part.values.nbytes]
            copy = raw.view(part.values.dtype).view(part.values.shape)
            copy.copy_(part.values.detach(), non_blocking=True)
            staged.append(replace(part, values=copy))
        for device in {part.values.device for part in parts if part.values.is_cuda}:
            torch.cuda.synchronize(device)
        return staged


def _places(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """For each part its piece and where it starts there; and the size of every piece. No part lies in two pieces."""
    places, pieces = [], [0]
    for size in sizes:
        aligned = -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
        if pieces[-1] and pieces[-1] + aligned > PIECE_BYTES:
            pieces.append(0)
        places.append((len(pieces) - 1, pieces[-1]))
        pieces[-1] += aligned
    return places, pieces
