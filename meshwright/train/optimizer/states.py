"""How an optimizer's moments are stored: exactly, in bf16, or in 8 bits with a scale for every block of a row.

A moment changes little in each step. With rounding to nearest, changes smaller than half a unit would be lost forever
(a second moment could grow but never shrink again). So rounding is dithered: up or down by a threshold that covers
(0, 1) evenly from step to step, which makes the mean over some steps correct. The threshold is a function of the
entry's position in the full matrix and of the step, so every layout rounds the same.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from meshwright.cost import SCALED_COLUMNS
from meshwright.errors import UserError
from meshwright.parallel import ShardIndex

FEWEST_BLOCKS = 8
"""A row is split into this many blocks if its length allows."""

# Inverse powers of the real roots of x³ = x + 1 and x² = x + 1, whose multiples fill (0, 1) evenly in the plane and
# over time.
_ROW_TURN, _COLUMN_TURN, _STEP_TURN = 0.7548776662466927, 0.5698402909980532, 0.6180339887498949

State = MutableMapping[str, Tensor]


@dataclass(frozen=True)
class Moment:
    """One of the tensors an optimizer stores for each parameter."""

    name: str
    signed: bool = True
    turn: float = 0.0
    """Added to the rounding thresholds, so that moments rounded together use different ones."""


@dataclass(frozen=True)
class Blocks:
    """Which columns of a full matrix share a scale: runs of `length` in every `unit`, the last one shorter."""

    unit: int
    length: int

    @classmethod
    def of(cls, columns: int, cuts: int) -> "Blocks":
        """The blocks of rows that tensor parallelism may split into `cuts` parts at most, or into divisors of that.

        They depend on the shape only, and no part ends inside one: every layout has the same blocks.
        """
        unit = columns // gcd(columns, cuts)
        return cls.within(unit, block_length(unit, columns))

    @classmethod
    def within(cls, unit: int, length: int) -> "Blocks":
        """Runs of a length in every `unit` columns; if it divides them, the run length alone defines the blocks."""
        return cls(length if unit % length == 0 else unit, length)

    def count(self, columns: int) -> int:
        """Number of blocks in this many columns, which are whole units."""
        return columns // self.unit * -(-self.unit // self.length)

    def span(self, columns: slice) -> slice:
        """The blocks that cover some columns of the full matrix."""
        if columns.start % self.unit or columns.stop % self.unit:
            raise UserError(
                f'precision.optimizer_states = "int8" has columns that share a scale in every {self.unit} of a matrix, '
                f"but layout.tp gives a rank columns {columns.start} to {columns.stop}; lower layout.tp or set "
                'precision.optimizer_states = "bf16"'
            )
        return slice(self.count(columns.start), self.count(columns.stop))

    def maxima(self, values: Tensor) -> Tensor:
        """The largest absolute entry of every block of every row."""
        units = values.reshape(len(values), -1, self.unit)
        short = -self.unit % self.length
        padded = torch.nn.functional.pad(units, (0, short)) if short else units
        return padded.reshape(len(values), -1, self.length).abs().amax(2)

    def spread(self, scales: Tensor) -> Tensor:
        """Expand every block's scale to its columns."""
        runs = -(-self.unit // self.length)
        wide = scales.repeat_interleave(self.length, dim=1).view(len(scales), -1, runs * self.length)
        return wide[:, :, : self.unit].flatten(1)


def block_length(unit: int, columns: int) -> int:
    """Columns of a unit that share a scale: halve as long as possible, or runs of 128."""
    length = unit
    while length % 2 == 0 and (length > SCALED_COLUMNS or columns // length < FEWEST_BLOCKS):
        length //= 2
    return min(length, SCALED_COLUMNS)


class Format(Protocol):
    """A way to store the moments of one parameter; `rows` are the rows of its shard to read or write together."""

    def make(self, state: State, moment: Moment, like: Tensor) -> None:
        """Create a moment of zeros in a parameter's state."""

    def read(self, state: State, moment: Moment, rows: slice, dtype: torch.dtype) -> Tensor:
        """Read a moment's values."""

    def write(self, state: State, moment: Moment, rows: slice, values: Tensor) -> None:
        """Store a moment's new values for the state's step."""


class Exact:
    """Moments in the format of the masters."""

    def make(self, state: State, moment: Moment, like: Tensor) -> None:
        """One tensor under the moment's name."""
        state[moment.name] = torch.zeros_like(like)

    def read(self, state: State, moment: Moment, rows: slice, dtype: torch.dtype) -> Tensor:
        """The values themselves."""
        return state[moment.name][rows]

    def write(self, state: State, moment: Moment, rows: slice, values: Tensor) -> None:
        """Copied."""
        state[moment.name][rows].copy_(values)


class Dither:
    """Rounding thresholds in [0, 1) for the entries of a matrix's shard."""

    def __init__(self, shard: ShardIndex, device: torch.device) -> None:
        columns = torch.arange(shard.shape[1]) if shard.columns is None else shard.columns
        self._rows = (shard.rows.double() * _ROW_TURN).frac().float().to(device).unsqueeze(1)
        self._columns = (columns.double() * _COLUMN_TURN).frac().float().to(device)

    def at(self, step: int, rows: slice, turn: float) -> Tensor:
        """The thresholds of some of the shard's rows at a step."""
        return (self._rows[rows] + ((step * _STEP_TURN + turn) % 1.0) + self._columns).frac_()


class Bf16:
    """Moments in bf16: 2 bytes, the range of fp32 and 8 bits of precision."""

    def __init__(self, shard: ShardIndex, device: torch.device) -> None:
        self._dither = Dither(shard, device)

    def make(self, state: State, moment: Moment, like: Tensor) -> None:
        """One tensor under the moment's name."""
        state[moment.name] = torch.zeros_like(like, dtype=torch.bfloat16)

    def read(self, state: State, moment: Moment, rows: slice, dtype: torch.dtype) -> Tensor:
        """Widened, which is exact."""
        return state[moment.name][rows].to(dtype)

    def write(self, state: State, moment: Moment, rows: slice, values: Tensor) -> None:
        """Truncate to the upper half of fp32's bits, after adding the threshold to the lower half."""
        thresholds = self._dither.at(int(state["step"]), rows, moment.turn)
        bits = values.float().view(torch.int32) + (thresholds * 2**16).to(torch.int32)
        state[moment.name][rows].copy_(bits.bitwise_and_(-(2**16)).view(torch.float32))


class Int8:
    """Moments in 8 bits: codes are multiples of a block's largest entry / 127, or / 255 if no entry is negative.

    Unsigned moments end up in denominators: a non-zero entry there keeps at least the code 1, so that nothing is ever
    divided by much less than the rounding error of what it divides.
    """

    def __init__(self, shard: ShardIndex, device: torch.device, cuts: int) -> None:
        self._dither, self._blocks = Dither(shard, device), Blocks.of(shard.shape[1], cuts)
        self._blocks.span(shard.box()[1])  # raises if the shard ends inside a block

    def make(self, state: State, moment: Moment, like: Tensor) -> None:
        """Two tensors: NAME.codes and NAME.scales."""
        blocks = self._blocks.count(like.shape[1])
        code = torch.int8 if moment.signed else torch.uint8
        state[f"{moment.name}.codes"] = torch.zeros_like(like, dtype=code)
        state[f"{moment.name}.scales"] = torch.zeros(like.shape[0], blocks, dtype=torch.float32, device=like.device)

    def read(self, state: State, moment: Moment, rows: slice, dtype: torch.dtype) -> Tensor:
        """Codes times scales."""
        codes, scales = state[f"{moment.name}.codes"][rows], state[f"{moment.name}.scales"][rows]
        return codes.to(dtype).mul_(self._blocks.spread(scales))

    def write(self, state: State, moment: Moment, rows: slice, values: Tensor) -> None:
        """New scales, and codes rounded down after adding the thresholds."""
        codes, scales = state[f"{moment.name}.codes"][rows], state[f"{moment.name}.scales"][rows]
        encode(values, self._blocks, self._dither.at(int(state["step"]), rows, moment.turn), codes, scales)


def encode(values: Tensor, blocks: Blocks, thresholds: Tensor | float, codes: Tensor, scales: Tensor) -> None:
    """Quantize values into codes (8 bits, signed or not) and scales; a threshold of 0.5 rounds to the nearest."""
    least, most = (-127, 127) if codes.dtype == torch.int8 else (1, 255)
    scales.copy_(blocks.maxima(values).div_(most))
    units = values / blocks.spread(scales.clamp(min=torch.finfo(torch.float32).tiny))
    codes.copy_(units.add_(thresholds).floor_().clamp_(least, most))


def format_of(name: str, shard: ShardIndex, device: torch.device, cuts: int = 1) -> Format:
    """The format by name for a parameter whose columns tensor parallelism splits into `cuts` parts at most.

    Anything but a matrix is small and stored exactly.
    """
    if name == "fp32" or len(shard.shape) != 2:
        return Exact()
    return Bf16(shard, device) if name == "bf16" else Int8(shard, device, cuts)
