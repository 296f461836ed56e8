"""Standard output and error of a process that trains, which it outlives.

A reader that ends (`| head`, a closed terminal) must not end a training: what follows goes to a file of the run folder.
Nor must a full disk under a log: what it does not accept is dropped.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from meshwright.runs.folder import RunFolder

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Stream(io.RawIOBase):
    """Writes to a descriptor and never fails; its first error is an event of the run."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name, self._descriptor = name, descriptor
        self._error: OSError | None = None
        self._folder: RunFolder | None = None
        self._log = ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: "bytes | memoryview", /) -> int:  # type: ignore[override]
        rest = memoryview(text).cast("B")
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                is_first = self._error is None
                self._error = self._error or error
                if error.errno not in _FULL:
                    self._redirect()
                if is_first:
                    self._report()
                if error.errno in _FULL:
                    break
        return len(text)

    def log_to(self, folder: RunFolder, log: str) -> None:
        """The run is known: its folder has the event, and a log for what nobody reads."""
        self._folder, self._log = folder, log
        if self._error is not None:
            if self._error.errno not in _FULL:
                self._redirect()
            self._report()

    def _redirect(self) -> None:
        """Point the descriptor to the log, for what libraries print, too; to nothing while there is no log."""
        file = os.devnull
        if self._folder is not None:
            with suppress(OSError):
                (self._folder.path / self._log).parent.mkdir(exist_ok=True)
                (self._folder.path / self._log).touch()
                file = str(self._folder.path / self._log)
        opened = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, self._descriptor)
        os.close(opened)

    def _report(self) -> None:
        if self._folder is not None and self._error is not None:
            log = None if self._error.errno in _FULL else self._log
            self._folder.event("output_lost", stream=self._name, error=self._error.strerror, log=log)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Inside, printing never fails; streams that a program has replaced, such as a notebook's, stay as they are."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        if type(stream) is io.TextIOWrapper:
            with suppress(OSError):
                stream.flush()
            with suppress(io.UnsupportedOperation):  # it has no descriptor
                lasting = _Stream(name, stream.fileno())
                setattr(sys, name, io.TextIOWrapper(lasting, stream.encoding, stream.errors, line_buffering=True))
    try:
        yield
    finally:
        for name, stream in before.items():
            if (lasting := getattr(sys, name)) is not stream:
                lasting.detach()  # flushes it, and leaves its descriptor open
                setattr(sys, name, stream)


def log_lost_output(folder: RunFolder, name: str) -> None:
    """From now on, lost output of this process goes to logs/NAME.out and logs/NAME.err of its run."""
    for stream, suffix in ((sys.stdout, "out"), (sys.stderr, "err")):
        if isinstance(lasting := getattr(stream, "buffer", None), _Stream):
            lasting.log_to(folder, f"logs/{name}.{suffix}")
