"""Tests wait for what must happen, not for a time: a busy machine is slower, not wrong."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from meshwright.data import watch

LIMIT_S = 120.0
"""After this long what a test waits for does not happen any more."""
T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str | Callable[[], str], limit_s: float = LIMIT_S) -> T:
    """Return what the condition gives once that is true; TimeoutError with `what` was waited for where it stays false.

    The condition may raise an AssertionError to end the wait at once.
    """
    limit = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > limit:
            raise TimeoutError(f"after {limit_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.01)
    return value


def wait_for_file(path: Path) -> None:
    """Return once another process or thread has made the file."""
    wait_until(path.exists, f"{path} is still missing")


class SlowWorker:
    """A data worker that delivers only after the watch has reported the wait for it.

    The limit of the watch is short from when the worker has begun to read until its report. On a busy machine training
    may wait for another step meanwhile: such a report is true, and not the one that is waited for.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float, sample: int) -> None:
        self._began, self._reported = folder / "began", folder / "reported"
        self._doing = f"reading the step of sample {sample})"
        self._monkeypatch = monkeypatch
        self.sentences: list[str] = []

        def shorten_the_limit() -> None:
            wait_for_file(self._began)
            monkeypatch.setattr(watch, "SLOW_S", slow_s)

        threading.Thread(target=shorten_the_limit, daemon=True).start()

    def read(self) -> None:
        """Called in the worker."""
        self._began.touch()
        wait_for_file(self._reported)

    def report(self, sentence: str) -> None:
        """Called by the watch, in the parent."""
        if self._doing in sentence:
            self.sentences.append(sentence)
            self._monkeypatch.setattr(watch, "SLOW_S", LIMIT_S)
            self._reported.touch()
