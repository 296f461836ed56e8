"""How long a GPU takes to write what the other ranks would have sent: neither compute nor the wire's time."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


class Copies:
    """Events around the writing of replaced messages, while on.

    Only of those that compute waits for, on its own stream: others are written beside it, as they would arrive.
    """

    def __init__(self) -> None:
        self.on = False
        self._inside = False
        self._events: list[tuple[float, Any, Any]] = []

    def begin(self) -> None:
        """Record from here on, forgetting what was recorded before."""
        self.on = True
        self._events.clear()

    def end(self) -> None:
        """Record no more."""
        self.on = False
        self._events.clear()

    def take_s(self, since: float = 0.0) -> float:
        """Seconds since the last call, or of what was issued since a time, once the GPU has come to its end."""
        if not self._events:
            return 0.0
        torch.cuda.synchronize()
        took = [started.elapsed_time(ended) for issued, started, ended in self._events if issued >= since]
        self._events.clear()
        return float(sum(took)) / 1e3

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A group's method whose writing is recorded; one that calls another is recorded once."""

        @wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not self.on or self._inside or torch.cuda.current_stream() != torch.cuda.default_stream():
                return call(*args, **kwargs)
            issued = time.perf_counter()
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._inside = True
            try:
                started.record()
                result = call(*args, **kwargs)
                ended.record()
            finally:
                self._inside = False
            self._events.append((issued, started, ended))
            return result

        return recorded


COPIES = Copies()
"""Of this process, which is one rank."""
