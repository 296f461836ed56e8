"""How a block of gradient entries becomes bytes and back: every block takes the same number of bytes.

Letters: N blocks, B entries of a block, K entries kept of it.
"""

from typing import Protocol

import torch
from torch import Tensor

CAST_BLOCK = 256
INT8_BLOCK = 256
"""A scale of 4 bytes for 256 entries is 1.6% more to send."""
TOPK_BLOCK = 1024
"""Entries compete with their neighbours, which are of the same parameter and of similar size; 16 bits suffice to index
them."""


class Codec(Protocol):
    """An encoding of blocks; the caller keeps track of what it loses."""

    block: int
    """Entries of a block."""

    def encode(self, values_NB: Tensor) -> Tensor:
        """The blocks as bytes, one row each."""

    def decode(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        """The blocks decoded from bytes."""


class Cast:
    """16-bit floating-point numbers."""

    block = CAST_BLOCK

    def __init__(self, format: torch.dtype) -> None:
        self._format, self._largest = format, torch.finfo(format).max

    def encode(self, values_NB: Tensor) -> Tensor:
        """Round every entry; what is too large for the format becomes its largest value, and only infinities stay
        infinite."""
        clamped = values_NB.clamp(-self._largest, self._largest)
        return torch.where(values_NB.isinf(), values_NB, clamped).to(self._format).view(torch.uint8)

    def decode(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        """The entries as they were rounded."""
        return payload.view(self._format).to(dtype)


class Int8:
    """Steps of 1/127 of a block's largest entry, and that step as a 32-bit number before them."""

    block = INT8_BLOCK

    def encode(self, values_NB: Tensor) -> Tensor:
        """Round every entry to its block's steps; a non-finite entry makes its whole block non-finite."""
        step_N1 = (values_NB.abs().amax(dim=1, keepdim=True) / 127).float()
        steps_NB = values_NB / torch.where(step_N1 > 0, step_N1, 1)
        whole_NB = steps_NB.round().clamp(-127, 127).to(torch.int8)
        return torch.cat([step_N1.view(torch.uint8), whole_NB.view(torch.uint8)], dim=1)

    def decode(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        """Steps times their size."""
        step_N1 = _aligned(payload[:, :4]).view(torch.float32)
        return payload[:, 4:].view(torch.int8).to(dtype) * step_N1.to(dtype)


class TopK:
    """The largest entries of a block as they are, each with its index."""

    block = TOPK_BLOCK

    def __init__(self, ratio: float) -> None:
        self._kept = max(1, round(ratio * self.block))

    def encode(self, values_NB: Tensor) -> Tensor:
        """Keep a block's largest entries by magnitude."""
        places_NK = values_NB.abs().topk(self._kept, dim=1, sorted=False).indices
        kept_NK = values_NB.gather(1, places_NK).contiguous()
        return torch.cat([kept_NK.view(torch.uint8), places_NK.to(torch.int16).view(torch.uint8)], dim=1)

    def decode(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        """The kept entries where they were, zeros elsewhere."""
        split = self._kept * dtype.itemsize
        kept_NK = _aligned(payload[:, :split]).view(dtype)
        places_NK = _aligned(payload[:, split:]).view(torch.int16).long()
        return kept_NK.new_zeros(len(payload), self.block).scatter_(1, places_NK, kept_NK)


def _aligned(payload: Tensor) -> Tensor:
    """A copy at the start of a storage: wider numbers can only be read at aligned addresses."""
    return payload.clone(memory_format=torch.contiguous_format)
