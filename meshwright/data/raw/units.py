"""The input cut into units of work: the same for any number of workers, each becoming one shard."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.data.raw.inputs import InputFile
from meshwright.data.raw.tables import count_groups

SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 32 << 20, 1 << 30
_UNITS = 4096
"""About so many of a large input."""


@dataclass(frozen=True)
class Piece:
    """A file, or a part of it: bytes of text and JSONL, row groups of Parquet, record batches of Arrow."""

    file: InputFile
    number: int
    """Place of the file in the input."""
    start: int
    stop: int
    whole: bool

    @property
    def first(self) -> bool:
        """Whether the file begins here."""
        return self.start == 0


@dataclass(frozen=True)
class Unit:
    """Pieces that one worker reads one after the other."""

    number: int
    pieces: tuple[Piece, ...]
    size_bytes: int


def plan_units(files: Sequence[InputFile], unit_bytes: int | None = None) -> list[Unit]:
    """Neighbouring small files together, large ones in parts where they can be parted."""
    if unit_bytes is None:
        total = sum(file.size_bytes for file in files)
        unit_bytes = min(LARGEST_UNIT_BYTES, max(SMALLEST_UNIT_BYTES, total // _UNITS))
    units: list[Unit] = []
    held: list[Piece] = []
    held_bytes = 0

    def close() -> None:
        nonlocal held, held_bytes
        if held:
            units.append(Unit(len(units), tuple(held), held_bytes))
        held, held_bytes = [], 0

    for number, file in enumerate(files):
        for piece, size_bytes in _pieces(file, number, unit_bytes):
            if held_bytes + size_bytes > unit_bytes:
                close()
            held.append(piece)
            held_bytes += size_bytes
    close()
    return units


def _pieces(file: InputFile, number: int, unit_bytes: int) -> Iterator[tuple[Piece, int]]:
    parts = -(-file.size_bytes // unit_bytes)
    if parts > 1 and file.seekable:
        if file.format in ("text", "jsonl"):
            for start in range(0, file.size_bytes, unit_bytes):
                stop = min(file.size_bytes, start + unit_bytes)
                yield Piece(file, number, start, stop, whole=False), stop - start
            return
        if file.format in ("parquet", "arrow") and (groups := count_groups(file)) > 1:
            parts = min(parts, groups)
            for part in range(parts):
                start, stop = part * groups // parts, (part + 1) * groups // parts
                yield Piece(file, number, start, stop, whole=False), file.size_bytes // parts
            return
    yield Piece(file, number, 0, file.size_bytes, whole=True), file.size_bytes
