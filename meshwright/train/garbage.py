"""Python's cycle collector on a schedule: by default it pauses a rank at its own time, and all others wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_STEPS = 100

_is_frozen = False
"""Whether `frozen` is entered, here or in the process that forked this one; to count what is frozen takes long."""


@contextmanager
def frozen() -> Iterator[None]:
    """Inside, the collector visits nothing that was there before: a process forked there would copy all of it."""
    global _is_frozen
    if _is_frozen:  # all but a little, and it stays so
        yield
        return
    gc.freeze()
    _is_frozen = True
    try:
        yield
    finally:
        gc.unfreeze()
        _is_frozen = False


@contextmanager
def collected_by_schedule() -> Iterator[None]:
    """Inside, only `collect_if_due` collects cycles; earlier objects are no longer visited."""
    if not gc.isenabled():
        yield
        return
    gc.collect()
    with frozen():
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def collect_if_due(step: int) -> None:
    """Collect on the same steps on every rank."""
    if not gc.isenabled() and step % EVERY_STEPS == 0:
        gc.collect()
