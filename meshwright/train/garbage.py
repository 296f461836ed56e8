"""Python's cycle collector on a schedule: left alone it stops a rank at a moment of its own, and all others wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_STEPS = 100


@contextmanager
def collected_by_schedule() -> Iterator[None]:
    """Inside, cycles are collected by `collect_if_due` alone; what was made before is not looked at any more."""
    if not gc.isenabled():
        yield
        return
    frozen = gc.get_freeze_count()  # by who forked this process, so that nothing it imported is visited and copied
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
