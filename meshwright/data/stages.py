"""Where the time of reading goes: a clock that somebody starts, and the parts of the work that it counts."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

READ, DECODE, ENCODE, PACK = "read", "decode", "encode", "pack"
"""Bytes out of files; items out of bytes; text to tokens; a sequence's tokens, labels and documents."""


class Stages:
    """Seconds by part of the work; a part inside of another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._own = _Clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Inside, time counts for this part."""
        self._count()
        self._own.open.append(name)
        try:
            yield
        finally:
            self._count()
            self._own.open.pop()

    def _count(self) -> None:
        own, now = self._own, time.perf_counter()
        if own.open:
            self.seconds[own.open[-1]] += now - own.since
        own.since = now


class _Clock(threading.local):
    """A thread's own: the GPU's items are decoded by another one than the one that reads."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.since = 0.0


_running: Stages | None = None


@contextmanager
def stages_timed() -> Iterator[Stages]:
    """Inside, what this process reads is counted; what worker processes read is not."""
    global _running
    _running = found = Stages()
    try:
        yield found
    finally:
        _running = None


def stage(name: str) -> AbstractContextManager[None]:
    """A part of the work; costs next to nothing while no clock runs."""
    return nullcontext() if _running is None else _running.part(name)
