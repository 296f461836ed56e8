"""Python's cycle collector on a schedule: by default it pauses a rank at its own time, and all others wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_STEPS = 100


@contextmanager
def collected_by_schedule() -> Iterator[None]:
    """Inside, only `collect_if_due` collects cycles; earlier objects are no longer visited."""
    if not gc.isenabled():
        yield
        return
    frozen = (
        gc.get_freeze_count()
    )  # by the parent that forked this process, so that its imports are not visited and copied
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not frozen:
            gc.unfreeze()


def collect_if_due(step: int) -> None:
    """Collect on the same steps on every rank."""
    if not gc.isenabled() and step % EVERY_STEPS == 0:
        gc.collect()
