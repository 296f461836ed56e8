"""Compressed files as plain streams; one that was cut short is an error, never a short text."""

import gzip
import io
from typing import Any, BinaryIO, cast

from meshwright.data.raw.extras import need
from meshwright.data.raw.inputs import Compression

_CHUNK = 1 << 18


def unpacked(stream: BinaryIO, compression: Compression, name: str) -> BinaryIO:
    """The bytes behind a compression, buffered."""
    if compression == "gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=io.BufferedReader(cast(Any, stream), _CHUNK)))
    if compression == "zst":
        return io.BufferedReader(cast(Any, _Zstandard(stream, name)), _CHUNK)
    return io.BufferedReader(cast(Any, stream), _CHUNK)


class _Zstandard(io.RawIOBase):
    """Frames one after the other; the library's own reader takes a cut frame for the end of the file."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        super().__init__()
        self._library = need("zstandard", name)
        self._stream = stream
        self._frame: Any = None
        self._held = b""
        self._rest = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next plain bytes."""
        while not self._held:
            packed = self._rest or self._stream.read(_CHUNK)
            self._rest = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("compressed file ended before the end-of-frame marker was reached")
                return 0
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._held = self._frame.decompress(packed)
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        taken = self._held[: len(buffer)]
        self._held = self._held[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        """Close the file below."""
        self._stream.close()
        super().close()
