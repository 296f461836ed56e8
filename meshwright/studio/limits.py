"""Limits of one server: connections, time and size of a request, and wrong guesses of its token."""

import http.client
import io
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CONNECTIONS = 64
"""Open at a time; a browser opens six."""
QUESTIONS = 16
"""Requests to the planner at a time: it answers one after the other."""
REQUEST_S = 15.0
"""From the moment a connection waits for a request until all of it has arrived, including the body."""
HEADER_BYTES = 1 << 15
WRONG_TOKENS, EVERY_S = 10, 60.0
"""After this many wrong tokens in this many seconds an address is blocked for the same time."""
ALL_WRONG_TOKENS = 300
"""The same for all addresses together that have never sent the right token."""
_ADDRESSES = 1024


class TooLarge(http.client.HTTPException):
    """A request with larger headers than any browser sends."""


class TimedReader(io.RawIOBase):
    """A connection's bytes within the limits on time and size: a slow client times out like a silent one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin()

    def begin(self) -> None:
        """Start waiting for a request."""
        self._until, self._room = time.monotonic() + REQUEST_S, HEADER_BYTES

    def allow(self, size: int) -> None:
        """Also allow a body of this size."""
        self._room += size

    def readable(self) -> bool:
        """Part of the stream interface."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read what has arrived; too late or too much is an error."""
        if self._room <= 0:
            raise TooLarge(f"more than {HEADER_BYTES} bytes of headers")
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(memoryview(buffer)[: self._room])
        self._room -= count
        return count


class Connections:
    """Open connections, the oldest first; at the limit, an idle one is closed for a new one."""

    def __init__(self, most: int = CONNECTIONS) -> None:
        self._most = most
        self._open: OrderedDict[socket.socket, bool] = OrderedDict()
        """Whether each is being answered."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: socket.socket) -> bool:
        """Accept a new one; False if all others are being answered."""
        with self._lock:
            if len(self._open) >= self._most:
                idle = next((one for one, answered in self._open.items() if not answered), None)
                if idle is None:
                    return False
                del self._open[idle]
                with suppress(OSError):  # its thread wakes up and exits
                    idle.shutdown(socket.SHUT_RDWR)
            self._open[connection] = False
            return True

    def answering(self, connection: socket.socket, now: bool) -> None:
        """Set whether a connection is being answered; waiting for a slow client does not count."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = now

    def leave(self, connection: socket.socket) -> None:
        """Forget one that was closed."""
        with self._lock:
            self._open.pop(connection, None)


class Guesses:
    """Wrong tokens by address, to prevent brute force."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()
        self._all: list[float] = []
        self._trusted: OrderedDict[str, None] = OrderedDict()
        """Addresses that have sent the right token."""
        self._lock = threading.Lock()

    def refused(self, address: str) -> bool:
        """Whether an address is blocked now after too many guesses, whatever its token."""
        with self._lock:
            since = self._clock() - EVERY_S
            own = [when for when in self._wrong.get(address, ()) if when > since]
            self._all = [when for when in self._all if when > since]
            return len(own) >= WRONG_TOKENS or (len(self._all) >= ALL_WRONG_TOKENS and address not in self._trusted)

    def wrong(self, address: str) -> None:
        """Count a wrong token."""
        with self._lock:
            now = self._clock()
            self._wrong[address] = [*self._wrong.pop(address, ()), now][-WRONG_TOKENS:]
            self._all = [*self._all, now][-ALL_WRONG_TOKENS:]
            if len(self._wrong) > _ADDRESSES:
                self._wrong.popitem(last=False)

    def right(self, address: str) -> None:
        """Remember an address that knows the token."""
        with self._lock:
            self._trusted[address] = None
            if len(self._trusted) > _ADDRESSES:
                self._trusted.popitem(last=False)
