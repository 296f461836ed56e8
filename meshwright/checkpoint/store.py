"""Anywhere fsspec can write, with a time limit on every request: a store may stop answering without an error.

A request runs in a thread of its own. One that outlasts its limit is abandoned, since a thread cannot be ended from
outside; a transfer may take any time while its bytes move.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from meshwright.checkpoint.shares import Incomplete
from meshwright.errors import UserError

ANSWER_S = 30.0
"""How long a store may take to answer a small request."""
STALLED_S = 60.0
"""How long a transfer may go without a byte; object stores report progress in parts of up to 50 MB."""
PATIENCE_S = 60.0
"""How long a store may keep failing on one request before the copy is abandoned."""
_UNANSWERED = threading.BoundedSemaphore(8)
"""Limits the requests that hang at once, and with them their threads and connections."""
_LASTING = frozenset(
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "ENOTDIR", "EISDIR")
)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Store:
    """An opened store: its file system, and the path in it that the address names."""

    target: str
    system: Any
    root: str

    @classmethod
    def open(cls, target: str) -> Self:
        """Open the store at an address; some stores connect here."""
        from fsspec.core import url_to_fs

        with refused_in_a_sentence(target, "opened"):
            system, root = _within(ANSWER_S, lambda: url_to_fs(target), lambda: 0.0)
        return cls(target, system, str(root))

    def ask(self, request: Callable[[Any], Answer]) -> Answer:
        """Make one small request."""
        return _within(ANSWER_S, lambda: request(self.system), lambda: 0.0)

    def retry(self, request: Callable[[Any], Answer]) -> Answer:
        """Make a small request, again while the store fails, for up to PATIENCE_S."""
        return _patiently(lambda: self.ask(request))

    def read_small(self, path: str) -> bytes | None:
        """The bytes of a small file; None if there is none."""
        self.system.invalidate_cache()
        try:
            return bytes(self.retry(lambda system: system.cat_file(path)))
        except FileNotFoundError:
            return None

    def entries(self, folder: str) -> list[str]:
        """The paths in a folder."""
        try:
            listed = self.retry(lambda system: system.ls(folder, detail=False))
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/") for path in listed]

    def upload(self, file: Path, path: str) -> None:
        """Copy a file to the store, and check that all its bytes arrived."""

        def put() -> None:
            self._transfer("put_file", str(file), path)
            self.system.invalidate_cache()
            self._require_size(path, file.stat().st_size, "were sent")

        _patiently(put)

    def download(self, path: str, file: Path) -> None:
        """Copy a file from the store, and check that all its bytes arrived."""

        def get() -> None:
            self._transfer("get_file", path, str(file))
            self._require_size(path, file.stat().st_size, "arrived")

        _patiently(get)

    def _require_size(self, path: str, size: int, what: str) -> None:
        stored = self.ask(lambda system: system.info(path)["size"])
        if stored is not None and stored != size:
            raise OSError(f"{path} has {stored} bytes, but {size} {what}")

    def _transfer(self, method: str, source: str, destination: str) -> None:
        from fsspec.callbacks import Callback
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.spec import AbstractFileSystem

        moved_at = 0.0

        def note(*_: object, **__: object) -> None:
            nonlocal moved_at
            moved_at = time.monotonic()

        progress = Callback(hooks={"moved": note})
        copy = getattr(self.system, method)
        if isinstance(self.system, LocalFileSystem):
            # Its own method reports no progress, and a large file takes minutes on a network disk.
            copy = partial(getattr(AbstractFileSystem, method), self.system)
        _within(STALLED_S, lambda: copy(source, destination, callback=progress), lambda: moved_at)


@contextmanager
def refused_in_a_sentence(target: str, what: str) -> Iterator[None]:
    """Every store raises its own errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"checkpoint.backup_to = {target} cannot be {what} ({error}); fix it or leave it out") from None


def sentence_of(error: Exception) -> str:
    """An error of a disk or a store as the reason in a message."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    is_sentence = isinstance(error, UserError | Incomplete | TimeoutError) and str(error)
    return str(error) if is_sentence else f"{type(error).__name__}: {error}"


def _within(limit_s: float, request: Callable[[], Answer], last_moved: Callable[[], float]) -> Answer:
    """Run a request in a thread, and raise TimeoutError once it has neither ended nor moved a byte for so long."""
    if not _UNANSWERED.acquire(blocking=False):
        raise TimeoutError("earlier requests are still not answered")
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:
            answer.set_exception(error)
        finally:
            _UNANSWERED.release()

    began = time.monotonic()
    threading.Thread(target=run, name="store request", daemon=True).start()
    while not answer.done():
        left_s = max(began, last_moved()) + limit_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"it has not answered for {limit_s:g} s")
        try:
            return answer.result(timeout=left_s)
        except TimeoutError:  # the request's own, or ours, which may have moved bytes meanwhile
            continue
    return answer.result()


def _patiently(request: Callable[[], Answer]) -> Answer:
    """Repeat a request while it fails for a reason that may pass, for up to PATIENCE_S."""
    until, wait_s = time.monotonic() + PATIENCE_S, 0.2
    while True:
        try:
            return request()
        except Exception as error:  # every store raises its own errors
            lasting = isinstance(error, FileNotFoundError) or getattr(error, "errno", None) in _LASTING
            if lasting or time.monotonic() + wait_s > until:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 5.0)
