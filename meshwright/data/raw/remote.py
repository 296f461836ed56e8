"""Files behind a URL: listed and read in ranges through fsspec, asked for again while the server is silent."""

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.data.raw.extras import need
from meshwright.errors import UserError

BLOCK_BYTES = 4 << 20
PATIENCE_S = 120.0
"""How long a server may stay silent before the work stops."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_WEB = ("http", "https")
# The clients' own retries would only multiply with ours.
_ONCE = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _ONCE, "s3a": _ONCE}
_MODULE = {"s3": "s3fs", "s3a": "s3fs", "http": "aiohttp", "https": "aiohttp"}

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteEntry:
    """One file on a server, as it was when listed."""

    url: str
    size_bytes: int | None
    """None where the server does not say."""
    stamp: str
    ranges: bool
    """Whether the server hands out parts of a file."""


def is_remote(name: str) -> bool:
    """Whether a source is a URL and not a path."""
    return "://" in name


def list_remote(url: str) -> list[RemoteEntry]:
    """The files a URL stands for, sorted: one file, a pattern's matches, or all below a folder of an object store."""
    system, path = _open_system(url)
    protocol = url.partition("://")[0]

    def unfold() -> list[tuple[str, dict[str, Any]]]:
        if protocol in _WEB:
            return [(path, system.info(path))]
        if any(sign in path for sign in "*?["):
            found = system.glob(path, detail=True)
        elif system.isfile(path):
            return [(path, system.info(path))]
        else:
            found = system.find(path, detail=True)
        return sorted((name, info) for name, info in found.items() if info.get("type") != "directory")

    entries = []
    for name, info in patiently(url, unfold, refuse_absent=True):
        full = name if "://" in name else f"{protocol}://{name}"
        if info.get("size") == 0 and protocol not in _WEB:
            continue  # object stores mark folders with empty objects
        ranges = protocol not in _WEB or patiently(url, lambda: _gives_ranges(system, path, info.get("size")))  # noqa: B023
        entries.append(RemoteEntry(full, info.get("size"), _stamp(info), ranges))
    if not entries:
        raise UserError(f"{url} holds no files; correct the address")
    return entries


class RemoteFile(io.RawIOBase):
    """A file read in ranges, each asked for again on failure: what was delivered is never lost or delivered twice.

    A file that changed since it was listed is refused, since its halves would not belong together.
    """

    def __init__(self, entry: RemoteEntry, on_retry: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._entry = entry
        self._system, self._path = _open_system(entry.url)
        self._on_retry = on_retry
        self._position = 0
        self._block = b""
        self._block_start = 0
        self._stream: Any = None

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """Only where the server hands out parts."""
        return self._entry.ranges and self._entry.size_bytes is not None

    def tell(self) -> int:
        """The place of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        if not self.seekable():
            raise io.UnsupportedOperation("the server does not hand out parts of this file")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._entry.size_bytes or 0}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """The next bytes, from the block held or from a new one."""
        offset = self._position - self._block_start
        if not 0 <= offset < len(self._block):
            self._block = patiently(self._entry.url, self._fetch, self._on_retry)
            self._block_start, offset = self._position, 0
        taken = self._block[offset : offset + len(buffer)]
        buffer[: len(taken)] = taken
        self._position += len(taken)
        return len(taken)

    def range(self, offset: int, size: int) -> bytes:
        """So many bytes from a place on, and nothing around them."""

        def fetch() -> bytes:
            data: bytes = self._system.cat_file(self._path, start=offset, end=offset + size)
            if len(data) != size:
                self._require_same(self._system.info(self._path))
                raise OSError(f"{len(data)} of {size} bytes came")
            return data

        return patiently(self._entry.url, fetch, self._on_retry)

    def close(self) -> None:
        """Let go of the connection."""
        if self._stream is not None:
            self._stream.close()
        super().close()

    def _fetch(self) -> bytes:
        entry = self._entry
        if not self.seekable():
            return self._fetch_onward()
        assert entry.size_bytes is not None
        end = min(entry.size_bytes, self._position + BLOCK_BYTES)
        if self._position >= end:
            return b""
        data: bytes = self._system.cat_file(self._path, start=self._position, end=end)
        if len(data) != end - self._position:
            self._require_same(self._system.info(self._path))
            raise OSError(f"{len(data)} of {end - self._position} bytes came")
        return data

    def _fetch_onward(self) -> bytes:
        """From a server without ranges: the next bytes of one long answer, begun anew and skipped after a failure."""
        try:
            if self._stream is None:
                self._stream = self._system.open(self._path, "rb", block_size=0)
                skipped = 0
                while skipped < self._position:
                    passed = len(self._stream.read(min(BLOCK_BYTES, self._position - skipped)))
                    if not passed:
                        raise OSError(f"the file ends at byte {skipped}")
                    skipped += passed
            data: bytes = self._stream.read(BLOCK_BYTES)
        except Exception:
            self._stream = None
            raise
        size = self._entry.size_bytes
        if not data and size is not None and self._position < size:
            self._stream = None
            raise OSError(f"the answer ended at byte {self._position} of {size}")
        return data

    def require_unchanged(self) -> None:
        """Refuse a file that is not the one that was listed."""
        self._require_same(patiently(self._entry.url, lambda: self._system.info(self._path), self._on_retry))

    def _require_same(self, info: dict[str, Any]) -> None:
        if (info.get("size"), _stamp(info)) != (self._entry.size_bytes, self._entry.stamp):
            raise UserError(f"{self._entry.url} changed while it was read; start again when nothing writes to it")


def patiently(
    url: str, act: Callable[[], T], on_retry: Callable[[], None] = lambda: None, *, refuse_absent: bool = False
) -> T:
    """Do something with a server, again and again while it fails, up to PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    wait = _FIRST_WAIT_S
    while True:
        try:
            return act()
        except UserError:
            raise
        except PermissionError as error:
            raise UserError(f"{url} may not be read ({error}); check the credentials in your environment") from error
        except Exception as error:  # every client has exceptions of its own
            if refuse_absent and isinstance(error, FileNotFoundError):
                raise UserError(f"{url} does not exist; correct the address") from error
            if time.monotonic() + wait > deadline:
                told = str(error).strip().splitlines() or [type(error).__name__]
                raise UserError(
                    f"{url} could not be read for {PATIENCE_S:.0f} s ({told[0][:200]}); start again when the "
                    "server answers"
                ) from error
        on_retry()
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_S)


def _open_system(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    if protocol in _MODULE:
        need(_MODULE[protocol], url)
    import fsspec

    try:
        # Listings are never remembered: what is asked twice is asked to learn whether it changed.
        system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **_OPTIONS.get(protocol, {}))
    except ImportError as error:
        raise UserError(f"{url} needs a package that is not installed ({error}); install it with pip") from error
    except ValueError as error:
        raise UserError(f"{url} is not an address fsspec knows ({error}); correct it") from error
    if protocol in ("s3", "s3a"):
        system.retries = 1
    return system, path


def _stamp(info: dict[str, Any]) -> str:
    """What changes when a file does, as far as the server tells."""
    for name in ("ETag", "etag", "checksum", "md5", "mtime", "LastModified", "Last-Modified", "Content-MD5"):
        if info.get(name):
            return str(info[name])
    return ""


def _gives_ranges(system: Any, path: str, size_bytes: int | None) -> bool:
    """Whether a web server answers a request for a part with that part; asking is the only way to know."""
    if size_bytes is None or size_bytes < 2:
        return False
    with system.open(path, "rb", block_size=1, cache_type="none", size=size_bytes) as stream:
        stream.seek(1)
        try:
            return len(stream.read(1)) == 1
        except ValueError:
            return False
