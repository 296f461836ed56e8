"""How an optimizer's moments are kept: as they are, in bf16, or in 8 bits with a scale for every block of a row.

A moment changes by little in each step. Rounded to the nearest, changes smaller than half a unit would be lost for
ever (a second moment could grow but never shrink again). So rounding is dithered: up or down by a threshold that goes
through (0, 1) evenly from step to step, which makes the mean over some steps right. The threshold is a function of the
entry's place in the whole matrix and of the step, so every layout rounds alike.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.parallel import Piece

LONGEST_BLOCK = 128
"""Most columns that share a scale in 8 bits."""
FEWEST_BLOCKS = 8
"""A row is cut into as many blocks where its length allows, so that tensor parallelism cuts between blocks."""

# Inverse powers of the real roots of x³ = x + 1 and x² = x + 1, whose multiples fill (0, 1) evenly in the plane and
# along time.
_ROW_TURN, _COLUMN_TURN, _STEP_TURN = 0.7548776662466927, 0.5698402909980532, 0.6180339887498949

State = MutableMapping[str, Tensor]


@dataclass(frozen=True)
class Moment:
    """One of the tensors an optimizer keeps for each parameter."""

    name: str
    signed: bool = True
    turn: float = 0.0
    """Added to the rounding thresholds, so that moments rounded together are not rounded alike."""


def block_length(columns: int) -> int:
    """Columns that share a scale in rows of a whole matrix: halves of halves as far as they go, or runs of 128.

    Halves rather than runs, because the ranks of tensor parallelism, mostly a power of two, then hold whole blocks.
    """
    length = columns
    while length % 2 == 0 and (length > LONGEST_BLOCK or columns // length < FEWEST_BLOCKS):
        length //= 2
    return min(length, LONGEST_BLOCK)


def cuts_blocks(columns: int, ranks: int) -> bool:
    """Whether ranks that share columns also share blocks of them: each then has a scale of its own for its part."""
    return ranks > 1 and columns // ranks % block_length(columns) != 0


class Format(Protocol):
    """A way to keep the moments of one parameter; `rows` are those of its piece that are read or written together."""

    def make(self, state: State, moment: Moment, like: Tensor) -> None:
        """Put a moment of zeros for a parameter into its state."""

    def read(self, state: State, moment: Moment, rows: slice, dtype: torch.dtype) -> Tensor:
        """A moment's values."""

    def write(self, state: State, moment: Moment, rows: slice, values: Tensor) -> None:
        """Keep a moment's new values, of the step the state counts."""


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
    """Rounding thresholds in [0, 1) for the entries of a matrix's piece."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        columns = torch.arange(piece.shape[1]) if piece.columns is None else piece.columns
        self._rows = (piece.rows.double() * _ROW_TURN).frac().float().to(device).unsqueeze(1)
        self._columns = (columns.double() * _COLUMN_TURN).frac().float().to(device)

    def at(self, step: int, rows: slice, turn: float) -> Tensor:
        """The thresholds of some of the piece's rows at a step."""
        return (self._rows[rows] + ((step * _STEP_TURN + turn) % 1.0) + self._columns).frac_()


class Bf16:
    """Moments in bf16: 2 bytes, the range of fp32 and 8 bits of precision."""

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self._dither = Dither(piece, device)

    def make(self, state: State, moment: Moment, like: Tensor) -> None:
        """One tensor under the moment's name."""
        state[moment.name] = torch.zeros_like(like, dtype=torch.bfloat16)

    def read(self, state: State, moment: Moment, rows: slice, dtype: torch.dtype) -> Tensor:
        """Widened, which is exact."""
        return state[moment.name][rows].to(dtype)

    def write(self, state: State, moment: Moment, rows: slice, values: Tensor) -> None:
        """Cut to the upper half of fp32's bits, after the threshold was added to the lower half."""
        thresholds = self._dither.at(int(state["step"]), rows, moment.turn)
        bits = values.float().view(torch.int32) + (thresholds * 2**16).to(torch.int32)
        state[moment.name][rows].copy_(bits.bitwise_and_(-(2**16)).view(torch.float32))


class Int8:
    """Moments in 8 bits: codes are multiples of a block's largest entry / 127, or / 255 where no entry is negative.

    Unsigned moments end up in denominators: what is not zero there keeps at least the code 1, so that nothing is ever
    divided by much less than the rounding of what it divides.
    """

    def __init__(self, piece: Piece, device: torch.device) -> None:
        self._dither, self._block = Dither(piece, device), block_length(piece.shape[1])

    def make(self, state: State, moment: Moment, like: Tensor) -> None:
        """Two tensors: NAME.codes and NAME.scales."""
        blocks = -(-like.shape[1] // self._block)
        code = torch.int8 if moment.signed else torch.uint8
        state[f"{moment.name}.codes"] = torch.zeros_like(like, dtype=code)
        state[f"{moment.name}.scales"] = torch.zeros(like.shape[0], blocks, dtype=torch.float32, device=like.device)

    def read(self, state: State, moment: Moment, rows: slice, dtype: torch.dtype) -> Tensor:
        """Codes times scales."""
        codes, scales = state[f"{moment.name}.codes"][rows], state[f"{moment.name}.scales"][rows]
        return codes.to(dtype).mul_(self._spread(scales, codes.shape[1]))

    def write(self, state: State, moment: Moment, rows: slice, values: Tensor) -> None:
        """New scales, and codes rounded down after the thresholds were added."""
        codes, scales = state[f"{moment.name}.codes"][rows], state[f"{moment.name}.scales"][rows]
        least, most = (-127, 127) if moment.signed else (1, 255)
        scales.copy_(self._maxima(values).div_(most))
        units = values / self._spread(scales.clamp(min=torch.finfo(torch.float32).tiny), values.shape[1])
        thresholds = self._dither.at(int(state["step"]), rows, moment.turn)
        codes.copy_(units.add_(thresholds).floor_().clamp_(least, most))

    def _maxima(self, values: Tensor) -> Tensor:
        """The largest absolute entry of every block of every row."""
        short = -values.shape[1] % self._block
        padded = torch.nn.functional.pad(values, (0, short)) if short else values
        return padded.view(padded.shape[0], -1, self._block).abs().amax(2)

    def _spread(self, scales: Tensor, columns: int) -> Tensor:
        """Every block's scale for each of its columns."""
        return scales.repeat_interleave(self._block, dim=1)[:, :columns]


def format_of(name: str, piece: Piece, device: torch.device) -> Format:
    """The format of a name for a parameter; what is no matrix is small and kept exactly."""
    if name == "fp32" or len(piece.shape) != 2:
        return Exact()
    return Bf16(piece, device) if name == "bf16" else Int8(piece, device)
