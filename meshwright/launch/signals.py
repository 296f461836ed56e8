"""Ctrl-C and SIGTERM end a run after the step at hand; a second one ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Becomes true when a signal asked the run to stop."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __call__(self) -> bool:
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
