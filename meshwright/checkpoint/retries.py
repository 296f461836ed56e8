"""Retries for a disk that is full or unavailable for the moment."""

import time
from collections.abc import Callable, Iterator

WAITS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""A minute in all: space freed by a person or by another job that ends comes within a minute or not soon."""
_BEAT_S = 0.25


def tries(alive: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Try at once, then retry after ever longer pauses, calling `alive` so that no watchdog fires."""
    yield
    for pause in WAITS_S:
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            alive()
            time.sleep(min(left, _BEAT_S))
        yield
