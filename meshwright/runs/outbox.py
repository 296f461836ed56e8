"""What a run records: rows appended to files and small complete files, buffered while the disk cannot be written.

A disk that is full for a while must neither end a training nor lose a row: what cannot be written now stays in
memory, a few hundred bytes per step, and is written in order as soon as there is space.
"""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.atomic import disk_refusal, write_atomic
from meshwright.errors import UserError

_TAIL_BYTES, _MOST_AT_ONCE = 2**16, 2**20


class Outbox:
    """Rows and files to be written to one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[str, bytearray] = {}
        self._files: dict[str, bytes] = {}
        self._opened: dict[str, int] = {}
        self._lock = threading.RLock()  # the launcher's watchdog reports from its own thread

    def append(self, name: str, row: bytes) -> OSError | None:
        """Append a row, which ends with a newline, to a file; returns the disk's error if it fails."""
        with self._lock:
            self._rows.setdefault(name, bytearray()).extend(row)
            return self.send()

    def put(self, name: str, content: bytes) -> OSError | None:
        """Write a small file, or overwrite it."""
        with self._lock:
            self._files[name] = content
            return self.send()

    def send(self) -> OSError | None:
        """Write everything pending, as far as the disk accepts it; returns the first error."""
        refusals: list[OSError] = []
        with self._lock:
            for name in list(self._files):
                with _noted(refusals):
                    self._write_file(name)
            for name in list(self._rows):
                with _noted(refusals):
                    self._write_rows(name)
        return refusals[0] if refusals else None

    def close(self) -> None:
        """Close open files; a later row reopens them."""
        with self._lock:
            for descriptor in self._opened.values():
                os.close(descriptor)
            self._opened.clear()

    def _write_file(self, name: str) -> None:
        path = self._folder / name
        if path.parent != self._folder:  # git and object stores do not keep empty folders
            path.parent.mkdir(exist_ok=True)
        write_atomic(path, self._files[name])
        del self._files[name]

    def _write_rows(self, name: str) -> None:
        rows, done = self._rows[name], 0
        try:
            if name not in self._opened:
                self._opened[name] = _open_rows(self._folder / name)
            while done < len(rows):  # unbuffered, so that a row has left the process when this returns
                done += os.write(self._opened[name], rows[done : done + _MOST_AT_ONCE])
            del self._rows[name]
        except OSError:
            del rows[: rows.rfind(b"\n", 0, done) + 1]
            if (descriptor := self._opened.pop(name, None)) is not None:  # reopening removes the torn row
                with suppress(OSError):
                    os.close(descriptor)
            raise


@contextmanager
def _noted(refusals: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        refusals.append(error)


def _open_rows(path: Path) -> int:
    """Open for appending, and cut off a torn row that a killed process or a full disk may have left at the end."""
    rows = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(rows).st_mode):
            raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
        if (whole := _end_of_last_row(rows)) < os.fstat(rows).st_size:
            os.truncate(rows, whole)
    except OSError:
        os.close(rows)
        raise
    return rows


def _end_of_last_row(rows: int) -> int:
    end = os.fstat(rows).st_size
    while end:
        start = max(0, end - _TAIL_BYTES)
        if (newline := os.pread(rows, end - start, start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn disk errors into one sentence about run.folder."""
    try:
        yield
    except OSError as error:
        raise refusal(folder, error) from error


def refusal(folder: Path, error: OSError) -> UserError:
    """A disk error as one sentence about run.folder."""
    subject, problem = f'run.folder = "{folder}"', error.strerror or str(error)
    other = UserError(f"{subject} cannot be written ({problem}); check the disk or choose a folder on another one")
    return disk_refusal(subject, error) or other
