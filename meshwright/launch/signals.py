"""Ctrl-C, SIGTERM and SIGUSR1 stop a run after the current step; a second signal stops it at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOP_FILE = "MESHWRIGHT_STOP_FILE"
"""Names a file that asks the run to stop, as a signal does: unlike a signal it cannot arrive before its handler."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to stop: a person, a system shutdown, a scheduler at its time limit."""
INTERRUPTED, REQUEUE = 130, 85
"""Exit codes of a run that was asked to stop and saved its state: by Ctrl-C, and by any other signal."""


def exit_code(reason: str | None) -> int:
    """The exit code of a run that a signal stopped after saving a checkpoint."""
    return INTERRUPTED if reason in (None, "SIGINT") else REQUEUE


class StopRequest:
    """True once a signal has asked the run to stop."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._file = Path(os.environ[STOP_FILE]) if STOP_FILE in os.environ else None

    def __call__(self) -> bool:
        if self.signal is None and self._file is not None and self._file.exists():
            self.signal = self._file.read_text().strip()
        return self.signal is not None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Record the first signal; let the second one interrupt whatever is running."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """While inside, these signals set the request instead of killing the process."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may install handlers
        return
    before = {number: signal.signal(number, request.handle) for number in STOPS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
