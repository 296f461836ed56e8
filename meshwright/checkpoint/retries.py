"""Waiting for a disk that takes nothing just now."""

import time
from collections.abc import Callable, Iterator

WAITS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""A minute in all: room that is made by a person or by another job that ends comes within one or not soon."""
_BEAT_S = 0.25


def tries(alive: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Once at once, then again after ever longer pauses, in which `alive` is called so that no watchdog barks."""
    yield
    for pause in WAITS_S:
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            alive()
            time.sleep(min(left, _BEAT_S))
        yield
