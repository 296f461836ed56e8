"""Lines of a file of any size, each held alone: too long ones are passed over, empty ones cost next to nothing."""

import io
from collections.abc import Iterator
from typing import NamedTuple

LONGEST_RECORD_BYTES = 64 << 20
"""A longer line, row or member is no document: parsing it could take many times as much memory."""
_PASSED_OVER_BYTES = 1 << 20


class Line(NamedTuple):
    """A line that holds something."""

    number: int
    """From 1 on, empty lines counted."""
    place: int
    """Of its first byte."""
    raw: bytes | None
    """None where it is longer than LONGEST_RECORD_BYTES."""


def lines_of(stream: io.BufferedReader, place: int = 0) -> Iterator[Line]:
    """The lines from here to the end, those of white space alone left out; the stream stands at the given place."""
    number = 1
    while raw := stream.readline(LONGEST_RECORD_BYTES + 1):
        start, line = place, number
        place += len(raw)
        number += 1
        if len(raw) > LONGEST_RECORD_BYTES:
            while not raw.endswith(b"\n") and (raw := stream.readline(_PASSED_OVER_BYTES)):
                place += len(raw)
            yield Line(line, start, None)
        elif not raw.isspace():
            yield Line(line, start, raw)
        else:
            # A file may hold a billion empty lines: those that lie in the buffer are passed over at once.
            ahead = stream.peek()
            blank = ahead.rfind(b"\n", 0, len(ahead) - len(ahead.lstrip())) + 1
            number += ahead.count(b"\n", 0, blank)
            place += len(stream.read(blank))
