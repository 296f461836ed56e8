"""Cycles are collected on the schedule's steps inside a run, and as ever outside."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from meshwright.train import garbage
from meshwright.train.garbage import EVERY_STEPS, collect_if_due, collected_by_schedule, frozen


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is frozen, as in a new process."""
    monkeypatch.setattr(garbage, "_is_frozen", False)
    gc.unfreeze()
    yield
    gc.freeze()


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_cycles_go_when_they_are_due(thawed: None) -> None:
    assert gc.isenabled()
    with collected_by_schedule():
        lost = weakref.ref(Cycle())
        collect_if_due(EVERY_STEPS - 1)
        assert not gc.isenabled() and lost() is not None
        collect_if_due(EVERY_STEPS)
        assert lost() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.thorough
def test_what_a_parent_froze_stays_so(thawed: None) -> None:
    for inside in (collected_by_schedule, frozen):
        with inside():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    with frozen():
        for inside in (collected_by_schedule, frozen):
            with inside():
                pass
            assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_who_keeps_the_collector_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collected_by_schedule():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
