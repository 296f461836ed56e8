"""Ctrl-C and SIGTERM end a run after the step at hand; a second one ends it at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOP_FILE = "MESHWRIGHT_STOP_FILE"
"""Names a file whose appearance asks the run to stop as a signal does: it cannot come before its handler."""


class StopRequest:
    """Becomes true when a signal asked the run to stop."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._file = Path(os.environ[STOP_FILE]) if STOP_FILE in os.environ else None

    def __call__(self) -> bool:
        if self.signal is None and self._file is not None and self._file.exists():
            self.signal = self._file.read_text().strip()
        return self.signal is not None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Remember the first signal; let the second one interrupt whatever is running."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """While inside, SIGINT and SIGTERM set the request instead of killing the process."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may install handlers
        return
    before = {number: signal.signal(number, request.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
