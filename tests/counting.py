"""Work counted in calls, which are the same on every machine, however busy it is."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Calls:
    """Calls of Python's and of C's functions in this thread."""

    count: int = 0


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Inside, calls are counted: what loops over more than it should calls more than it should."""
    calls = Calls()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.count += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)
