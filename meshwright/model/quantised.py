"""Frozen matrices in 4 or 8 bits, in the formats of bitsandbytes: how they are quantised, and what they stand for.

nf4   blocks of 64 numbers of a row share a scale; a number is one of 16 quantiles of a normal distribution times it
      (QLoRA, arXiv:2305.14314). Of the scales their mean is subtracted; then blocks of 256 of them share a scale, and
      each is one of 256 numbers, dense near zero, times that (arXiv:2110.02861).
int8  every row has a scale, the largest of its numbers, which 127 stands for (arXiv:2208.07339).

O outputs, I inputs, G blocks of a row. Everything is computed in fp32, so that codes are the same whoever makes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.job.adapter import BLOCK, SCALES_PER_BLOCK

NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""What the codes of nf4 stand for."""
_LEAST = 1e-38
"""Divides a block of zeros."""
_PAIRS = 256 * 2


@dataclass(frozen=True)
class Packed:
    """A quantised matrix (O, I)."""

    codes: Tensor
    """nf4: two in a byte, the first in its high half (O, I / 2); int8: one each (O, I)."""
    absmax_OG: Tensor | None
    """nf4: the codes of the blocks' scales; int8: none."""
    scales: Tensor
    """nf4: the mean of the blocks' scales, then the scale of every 256 of them; int8: the scale of every row."""

    @property
    def format(self) -> str:
        """`nf4` or `int8`."""
        return "int8" if self.absmax_OG is None else "nf4"

    def to(self, device: torch.device) -> "Packed":
        """The same on a device."""
        absmax_OG = None if self.absmax_OG is None else self.absmax_OG.to(device)
        return Packed(self.codes.to(device), absmax_OG, self.scales.to(device))

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix it stands for."""
        if self.absmax_OG is None:
            return dequantise_int8(self.codes, self.scales, dtype)
        groups = self.absmax_OG.shape[1]
        return dequantise_nf4(
            self.codes, self.absmax_OG, self.scales, tables().to(self.codes.device), (0, 0, groups), dtype
        )


def quantise(weight_OI: Tensor, name: str) -> Packed:
    """A matrix in the format of this name."""
    return finish(*quantise_rows(weight_OI, name), name)


def quantise_rows(weight_OI: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes and fp32 scales of some rows of a matrix: in nf4 of every block, of which a row must have whole ones."""
    wide_OI = weight_OI.float()
    if name == "int8":
        absmax_O = wide_OI.abs().amax(1)
        return torch.round(wide_OI * (127.0 / absmax_O.clamp(min=_LEAST)).unsqueeze(1)).to(torch.int8), absmax_O
    outputs, inputs = weight_OI.shape
    blocks = wide_OI.reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    codes = _nearest(_scaled(blocks, absmax), torch.tensor(NORMAL_FLOAT, device=weight_OI.device))
    codes = codes.view(outputs, inputs // 2, 2)
    return codes[..., 0] << 4 | codes[..., 1], absmax.view(outputs, inputs // BLOCK)


def finish(codes: Tensor, absmax: Tensor, name: str) -> Packed:
    """The matrix whose rows have these codes and scales; in nf4 the scales are quantised too."""
    if name == "int8":
        return Packed(codes, None, absmax)
    flat = absmax.flatten()
    offset = flat.double().mean().float()  # in float64 it does not depend on the order of the sum
    padded = F.pad(flat - offset, (0, -len(flat) % SCALES_PER_BLOCK)).view(-1, SCALES_PER_BLOCK)
    nested = padded.abs().amax(1)
    scale_codes = _nearest(_scaled(padded, nested), dynamic_codes().to(absmax.device)).flatten()[: len(flat)]
    return Packed(codes, scale_codes.view(absmax.shape), torch.cat((offset.view(1), nested)))


def dequantise_nf4(
    codes: Tensor, absmax_OG: Tensor, scales: Tensor, table: Tensor, place: tuple[int, int, int], dtype: torch.dtype
) -> Tensor:
    """The rows and columns of a matrix that these codes are; `place` is the first row, the first block of a row, and
    how many blocks a whole row has; `table` is what `tables` returns."""
    outputs, groups = absmax_OG.shape
    first_row, first_group, whole_groups = place
    # Spread instead of looked up: a compiler would keep the places.
    each = scales[1:].unsqueeze(1).expand(-1, SCALES_PER_BLOCK).flatten()
    nested = each[first_row * whole_groups : (first_row + outputs) * whole_groups].view(outputs, whole_groups)
    nested_OG = nested[:, first_group : first_group + groups]
    known_OG = table[_PAIRS:][absmax_OG.int()]
    absmax = known_OG * nested_OG + scales[0]
    numbers = table[:_PAIRS].view(256, 2)[codes.int()].view(outputs, groups, BLOCK)
    return (numbers * absmax.unsqueeze(-1)).to(dtype).view(outputs, groups * BLOCK)


def dequantise_int8(codes_OI: Tensor, scales_O: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of a matrix that these codes and their scales are."""
    return (codes_OI.float() * scales_O.unsqueeze(1) * (1.0 / 127.0)).to(dtype)


@cache
def tables() -> Tensor:
    """What bytes stand for in nf4: as two numbers, 256 times, then as a scale, 256 times."""
    numbers = torch.tensor(NORMAL_FLOAT)
    pairs = torch.stack((numbers.repeat_interleave(16), numbers.repeat(16)), dim=1)
    return torch.cat((pairs.flatten(), dynamic_codes()))


@cache
def dynamic_codes() -> Tensor:
    """The 256 numbers that quantised scales are multiples of: of seven decades, each with twice as many as the smaller
    one, the middles of equal steps with both signs; zero and one."""
    return torch.tensor(sorted([0.0, 1.0, *_decades()]))


def _decades() -> Iterator[float]:
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2**decade + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        yield from (*middles.tolist(), *(-middles).tolist())


def _scaled(blocks: Tensor, absmax: Tensor) -> Tensor:
    """Blocks between -1 and 1."""
    return blocks * (1.0 / absmax.clamp(min=_LEAST)).unsqueeze(1)


def _nearest(numbers: Tensor, codes: Tensor) -> Tensor:
    """The place of the nearest of ascending codes."""
    return torch.bucketize(numbers, (codes[:-1] + codes[1:]) / 2, out_int32=True).to(torch.uint8)
