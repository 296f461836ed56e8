"""Compressed files as plain streams: unpacked a little at a time, and one that was cut short is an error."""

import gzip
import io
from typing import Any, BinaryIO, cast

from meshwright.data.raw.extras import need
from meshwright.data.raw.inputs import Compression
from meshwright.errors import UserError

_CHUNK = 1 << 18
LARGEST_RATIO = 1000
"""Text is packed to a tenth, the most repetitive to a few hundredths; a file beyond this was made to do harm."""
JUDGED_FROM_BYTES = 8 << 20


def unpacked(stream: BinaryIO, compression: Compression, name: str) -> io.BufferedReader:
    """The bytes behind a compression, buffered; memory does not grow with what they unpack to."""
    if compression == "none":
        return io.BufferedReader(cast(Any, stream), _CHUNK)
    packed = _Counted(stream)
    if compression == "gz":
        plain = cast(BinaryIO, gzip.GzipFile(fileobj=io.BufferedReader(cast(Any, packed), _CHUNK)))
    else:
        pyarrow = need("pyarrow", name)
        plain = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, mode="r"), "zstd")
    return io.BufferedReader(cast(Any, _Judged(plain, packed, name)), _CHUNK)


def out_of_proportion(name: str, how: str) -> UserError:
    """One sentence for a file that unpacks to more than any text does."""
    return UserError(
        f"{name} unpacks to more than {LARGEST_RATIO} times its size ({how}), which no text does; leave it out, or "
        "unpack it yourself"
    )


class _Counted(io.RawIOBase):
    """A stream that knows how much was read of it."""

    def __init__(self, inner: BinaryIO) -> None:
        super().__init__()
        self._inner = inner
        self.count = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes."""
        count: int = cast(Any, self._inner).readinto(buffer)
        self.count += count
        return count

    def close(self) -> None:
        """Close the stream below."""
        self._inner.close()
        super().close()


class _Judged(_Counted):
    """What is unpacked, refused where it is out of all proportion to the file."""

    def __init__(self, plain: BinaryIO, packed: _Counted, name: str) -> None:
        super().__init__(plain)
        self._packed, self._name = packed, name

    def readinto(self, buffer: Any) -> int:
        """The next plain bytes."""
        count = super().readinto(buffer)
        if self.count > JUDGED_FROM_BYTES and self.count > LARGEST_RATIO * self._packed.count:
            raise out_of_proportion(self._name, f"its first {self._packed.count:,} bytes to {self.count:,}")
        return count

    def close(self) -> None:
        """Close both streams."""
        super().close()
        self._packed.close()
