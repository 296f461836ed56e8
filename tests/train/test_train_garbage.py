"""Cycles are collected on the schedule's steps inside a run, and as ever outside."""

import gc
import weakref

from meshwright.train.garbage import EVERY_STEPS, collect_if_due, collected_by_schedule


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_cycles_go_when_they_are_due() -> None:
    assert gc.isenabled()
    with collected_by_schedule():
        lost = weakref.ref(Cycle())
        collect_if_due(EVERY_STEPS - 1)
        assert not gc.isenabled() and lost() is not None
        collect_if_due(EVERY_STEPS)
        assert lost() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_what_a_parent_froze_stays_so() -> None:
    gc.freeze()
    try:
        with collected_by_schedule():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_who_keeps_the_collector_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collected_by_schedule():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
