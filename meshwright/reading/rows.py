"""Files of rows, one JSON object per line: read in blocks, each line checked by itself, bad ones counted."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf, nan
from pathlib import Path
from typing import Any

from meshwright.reading.bounded import Unfit, open_plain, parse_json

Row = dict[str, Any]

LONGEST_LINE = 1 << 20
CHUNK = 1 << 20
KEPT_BYTES = 8 << 20
"""Bytes of lines kept of a file whose rows are needed at once, a quarter of them its first, the others its last."""
# JSON has no values for these, and a non-finite loss must not be read as a missing one.
NOT_FINITE = {"nan": nan, "inf": inf, "-inf": -inf}


@dataclass(frozen=True)
class Kind:
    """A file of a run by its name, and what every row of it must be."""

    name: str
    fault: Callable[[Row], str | None]
    """What is wrong with a row; None where nothing is."""


@dataclass
class Tally:
    """How many lines of a file were read, and what could not be."""

    name: str
    lines: int = 0
    bad: int = 0
    left_out: int = 0
    """Valid rows that were too many to keep."""
    why: str = ""
    """What is wrong with the first bad line."""
    whole: bool = field(default=True, repr=False)
    """Whether lines are counted from the file's first, so that their numbers mean something."""

    def count_bad(self, why: str, number: int) -> None:
        """Count a skipped line."""
        self.bad += 1
        if self.bad == 1:
            self.why = f"line {number:,}: {why}" if self.whole else why

    def sentence(self) -> str | None:
        """What a page says about missing lines; None where all were read."""
        if self.bad:
            lines = "one line" if self.bad == 1 else f"{self.bad:,} lines"
            return f"{lines} of {self.name} cannot be read and {'is' if self.bad == 1 else 'are'} left out ({self.why})"
        return f"{self.left_out:,} rows in the middle of {self.name} are left out" if self.left_out else None


def stream_rows(path: Path, kind: Kind, tally: Tally, newest_bytes: int | None = None) -> Iterator[Row]:
    """Every valid row of a file, or of its last bytes, holding one block at a time; an unfinished last line is
    left out."""
    descriptor = open_plain(path)
    try:
        if newest_bytes is not None and (start := os.fstat(descriptor).st_size - newest_bytes) > 0:
            tally.whole = False
            os.lseek(descriptor, start, os.SEEK_SET)
            _skip_line(descriptor, newest_bytes)
        for batch in batches_of(descriptor, kind, tally):
            yield from batch
    finally:
        os.close(descriptor)


def kept_rows(path: Path, kind: Kind, tally: Tally, wanted: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """The requested rows of a file, the first and last of them if they are too many to hold at once."""
    head, tail = list[Row](), deque[tuple[Row, int]]()
    room, held = KEPT_BYTES // 4, 0
    descriptor = open_plain(path)
    try:
        for lines in _stretches(descriptor, tally):
            # Line by line: a row's size is the length of its line.
            for number, line in enumerate(lines, tally.lines - len(lines) + 1):
                row = _row(line, kind, tally, number)
                if row is None or not wanted(row):
                    continue
                if room > 0:
                    room -= len(line)
                    head.append(row)
                    continue
                held += len(line)
                tail.append((row, len(line)))
                while held > 3 * KEPT_BYTES // 4:
                    held -= tail.popleft()[1]
                    tally.left_out += 1
    finally:
        os.close(descriptor)
    return [*head, *(row for row, _ in tail)]


def batches_of(descriptor: int, kind: Kind, tally: Tally) -> Iterator[list[Row]]:
    """Every valid row of an open file, as many at a time as one read gives."""
    for lines in _stretches(descriptor, tally):
        yield _rows(lines, kind, tally)


def rows_in(data: bytes, kind: Kind, tally: Tally) -> list[Row]:
    """The valid rows of a block of whole lines; what follows the last line's end is left out."""
    lines = data.split(b"\n")[:-1]
    tally.lines += len(lines)
    return _rows(lines, kind, tally)


def _stretches(descriptor: int, tally: Tally) -> Iterator[list[bytes]]:
    """Whole lines, block by block; of an endless line at most one block is held."""
    rest, skipping = b"", False
    while data := _read(descriptor):
        *lines, rest = (rest + data).split(b"\n")
        if skipping and lines:
            del lines[0]
            skipping = False
        tally.lines += len(lines)
        yield lines
        if skipping or len(rest) > LONGEST_LINE:
            if not skipping:
                tally.lines += 1
                tally.count_bad(_TOO_LONG, tally.lines)
            rest, skipping = b"", True


def _skip_line(descriptor: int, most: int) -> None:
    """Continue after the end of the next line."""
    place = os.lseek(descriptor, 0, os.SEEK_CUR)
    newline = os.pread(descriptor, most, place).find(b"\n")
    os.lseek(descriptor, place + (most if newline < 0 else newline + 1), os.SEEK_SET)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, CHUNK)
    except OSError as error:
        raise Unfit(f"it cannot be read: {error.strerror}") from None


_TOO_LONG = f"it has more than {LONGEST_LINE:,} bytes"


def _rows(lines: list[bytes], kind: Kind, tally: Tally) -> list[Row]:
    first = tally.lines - len(lines) + 1
    return _at_once(lines, kind) or [
        row for number, line in enumerate(lines, first) if (row := _row(line, kind, tally, number)) is not None
    ]


def _at_once(lines: list[bytes], kind: Kind) -> list[Row] | None:
    """Rows of lines parsed as one list, which is faster; None where any line needs its own check."""
    if not lines or max(map(len, lines)) > LONGEST_LINE:
        return None
    data = b"[" + b",".join(lines) + b"]"
    try:
        rows: list[Row] = parse_json(data, flat=data.count(b"{") + data.count(b"[") == len(lines) + 1)
    except Unfit:
        return None
    if len(rows) != len(lines) or not all(type(row) is dict for row in rows):
        return None
    if b'"nan"' in data or b'inf"' in data:
        for row in rows:
            _restore(row)
    return None if any(map(kind.fault, rows)) else rows


def _row(line: bytes, kind: Kind, tally: Tally, number: int) -> Row | None:
    try:
        if len(line) > LONGEST_LINE:
            raise Unfit(_TOO_LONG)
        row = parse_json(line)
        if not isinstance(row, dict):
            raise Unfit("it is not a table of fields")
        _restore(row)
        if (fault := kind.fault(row)) is not None:
            raise Unfit(fault)
    except Unfit as unfit:
        tally.count_bad(str(unfit), number)
        return None
    return row


def _restore(row: Row) -> None:
    """Convert the strings for non-finite floats back."""
    for name, value in row.items():
        if type(value) is str and value in NOT_FINITE:
            row[name] = NOT_FINITE[value]
