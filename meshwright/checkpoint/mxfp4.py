"""Weights in MXFP4, as gpt-oss is published: blocks of 32 four-bit numbers that share a power of two."""

from typing import Any

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""What the names of the two tensors end with: packed pairs of numbers, low half first, and biased exponents."""
FORMAT = "MXFP4"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def unpacked_size(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The size of the tensor that blocks of this size (experts, outputs, groups, bytes) stand for."""
    experts, outputs, groups, bytes_ = blocks
    return experts, groups * bytes_ * 2, outputs


class Unpacked:
    """Blocks and scales, sliced like the tensor (experts, inputs, outputs) that they stand for; exact in fp32."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        experts, inputs, outputs = index
        packed, exponents = self._blocks[experts, outputs], self._scales[experts, outputs]
        signed = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
        pairs = torch.stack((signed[(packed & 15).long()], signed[(packed >> 4).long()]), dim=-1)
        numbers = torch.ldexp(pairs.flatten(-2), exponents.int().unsqueeze(-1) - _BIAS)
        return numbers.flatten(-2).transpose(1, 2)[:, inputs]
