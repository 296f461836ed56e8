"""Tests wait for what must happen, not for a time: a busy machine is slower, not wrong."""

import threading
import time
from pathlib import Path

import pytest

from meshwright.data import watch

LIMIT_S = 120.0
"""After this long what a test waits for does not happen any more."""


def wait_for_file(path: Path) -> None:
    """Return once another process or thread has made the file."""
    limit = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"{path} is still missing after {LIMIT_S:g} s")
        time.sleep(0.01)


class SlowWorker:
    """A data worker that delivers only after the watch has reported the wait for it.

    The limit of the watch becomes short when the worker has begun to read: before that, a busy machine could make
    training wait for another one.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float) -> None:
        self._began, self._reported = folder / "began", folder / "reported"
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
        self.sentences.append(sentence)
        self._reported.touch()
