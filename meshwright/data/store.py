"""Tokens at rest: memory-mapped files with document starts, their writer, and an endless synthetic stand-in."""

import os
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.files import open_regular
from meshwright.data.hashing import mix_array
from meshwright.errors import UserError

Int64Array = NDArray[np.int64]
_MOVED_TOKENS = 1 << 20


class TokenStore(Protocol):
    """A long row of tokens in which documents start at known places; can be sent to another process."""

    def __len__(self) -> int:
        """Number of tokens."""

    def read(self, start: int, stop: int) -> Int64Array:
        """The tokens from start up to stop."""

    def starts_between(self, start: int, stop: int) -> Int64Array:
        """Where documents start, start included and stop not."""

    def targets(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Which of the tokens the loss counts; None where it counts all."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Two bytes a token where they are enough, else four; little endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class FileTokens:
    """A token file and its document starts, opened on first use in whichever process reads it."""

    def __init__(
        self, folder: Path, split: str, count: int, dtype: str, vocab_size: int, has_targets: bool = False
    ) -> None:
        self._tokens_path = folder / f"{split}.bin"
        self._starts_path = folder / f"{split}.documents.npy"
        self._targets_path = folder / f"{split}.targets.bin" if has_targets else None
        self._count, self._vocab_size = count, vocab_size
        self._dtype = np.dtype(dtype)
        self._tokens: NDArray[Any] | None = None
        self._starts: Int64Array | None = None
        self._targets: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None, "_starts": None, "_targets": None}

    def read(self, start: int, stop: int) -> Int64Array:
        """The tokens from start up to stop."""
        if self._tokens is None:
            self._tokens = self._map(self._tokens_path, self._dtype)
        tokens = self._tokens[start:stop].astype(np.int64)
        if len(tokens) and (largest := int(tokens.max())) >= self._vocab_size:
            place = start + int(tokens.argmax())
            raise UserError(
                f"{self._tokens_path} holds the token {largest} at place {place} where there are {self._vocab_size}, "
                f"so it is damaged; delete the folder {self._tokens_path.parent} and prepare it again"
            )
        return tokens

    def starts_between(self, start: int, stop: int) -> Int64Array:
        """Where documents start, start included and stop not."""
        if self._starts is None:
            self._starts = load_index(self._starts_path)
        first, last = np.searchsorted(self._starts, (start, stop))
        found = np.array(self._starts[first:last])
        # Of the whole index only what is read is looked at: it may be larger than memory.
        if len(found) and not (start <= found[0] and found[-1] < stop and (np.diff(found) >= 0).all()):
            raise _lost(self._starts_path)
        return found

    def targets(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Which of the tokens the loss counts; None where it counts all."""
        if self._targets_path is None:
            return None
        if self._targets is None:
            self._targets = self._map(self._targets_path, np.dtype(np.bool_))
        return np.array(self._targets[start:stop])

    def _map(self, path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
        if self._count == 0:
            return np.empty(0, dtype)
        try:
            open_regular(path).close()
            # A shorter file would kill the process on access, so its size is checked by asking for the shape.
            # Slices of a plain array are made several times faster than those of a memmap.
            return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(self._count,)))
        except (OSError, ValueError, OverflowError) as error:
            raise _lost(path) from error


def load_index(path: Path) -> Int64Array:
    """A row of whole numbers in a file that this product wrote, mapped; one that is none is refused by name."""
    try:
        open_regular(path).close()
        found = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except Exception as error:  # numpy parses headers without a care
        raise _lost(path) from error
    if found.ndim != 1 or found.dtype != np.int64:
        raise _lost(path)
    return found


def write_index(path: Path, numbers: "array[int]") -> None:
    """Write a row of whole numbers for `load_index`, and bring it to the disk."""
    row = np.frombuffer(numbers, np.int64) if numbers else np.empty(0, np.int64)
    # numpy.save would not say that the disk is full: its error carries no number.
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(row))
        stream.write(row.tobytes())
        stream.flush()
        os.fsync(stream.fileno())


class SyntheticTokens:
    """Tokens that are a hash of their place: endless, no file, documents of about a thousand tokens."""

    end_of_text = 0
    _document_tokens = 1000

    def __init__(self, vocab_size: int, key: int, count: int = 1 << 40) -> None:
        self._vocab_size = vocab_size
        self._key = key
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Int64Array:
        """The tokens from start up to stop."""
        stop = min(stop, self._count)
        hashed = mix_array(np.arange(start, stop, dtype=np.int64), self._key)
        tokens = (hashed % np.uint64(self._vocab_size)).astype(np.int64)
        tokens[self.starts_between(start + 1, stop + 1) - 1 - start] = self.end_of_text
        return tokens

    def starts_between(self, start: int, stop: int) -> Int64Array:
        """Where documents start, start included and stop not: one somewhere in each thousand tokens."""
        thousands = np.arange(start // self._document_tokens, stop // self._document_tokens + 1, dtype=np.int64)
        inside = (mix_array(thousands, self._key + 1) % np.uint64(self._document_tokens)).astype(np.int64)
        starts = thousands * self._document_tokens + inside
        return starts[(starts >= start) & (starts < stop)]

    def targets(self, start: int, stop: int) -> None:
        """All of them."""


class TokenWriter:
    """Writes one split, a document at a time and each document in as many parts as it comes."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], *, marked: bool = False) -> None:
        self._stream = (folder / f"{split}.bin").open("w+b")
        self._targets = (folder / f"{split}.targets.bin").open("wb") if marked else None
        self._starts_path = folder / f"{split}.documents.npy"
        self._starts = array("q")
        self._dtype = dtype
        self.count = 0

    @property
    def documents(self) -> int:
        """Documents begun so far."""
        return len(self._starts)

    def begin_document(self) -> None:
        """The tokens that follow belong to a new document."""
        self._starts.append(self.count)

    def append(self, tokens: list[int] | Int64Array, targets: list[bool] | None = None) -> None:
        """Add tokens to the current document; where the loss does not count all, with those it does."""
        if self._targets is not None:
            assert targets is not None and len(targets) == len(tokens)
            self._targets.write(np.asarray(targets, np.bool_).tobytes())
        self._stream.write(np.array(tokens, self._dtype).tobytes())
        self.count += len(tokens)

    def move_end(self, count: int, other: "TokenWriter") -> None:
        """Hand the last tokens of the current document over to another writer, a little at a time."""
        size, stop = self._dtype.itemsize, self.count
        self.count -= count
        for first in range(self.count, stop, _MOVED_TOKENS):
            self._stream.seek(first * size)
            raw = self._stream.read(min(_MOVED_TOKENS, stop - first) * size)
            other.append(np.frombuffer(raw, self._dtype).astype(np.int64))
        self._stream.seek(self.count * size)
        self._stream.truncate()

    def finish(self) -> None:
        """Write the document starts and bring both files to the disk."""
        write_index(self._starts_path, self._starts)
        for written in self._streams():
            written.flush()
            os.fsync(written.fileno())
            written.close()

    def _streams(self) -> list[BinaryIO]:
        return [self._stream] if self._targets is None else [self._stream, self._targets]

    def close(self) -> None:
        """Let go of the file, whatever state it is in."""
        for stream in self._streams():
            with suppress(OSError):  # the disk may be full and the buffer unwritten; the folder is thrown away then
                stream.close()


def _lost(path: Path) -> UserError:
    return UserError(
        f"data.cache: {path} is gone, damaged or was cut short since it was prepared; delete the folder {path.parent} "
        "and start again"
    )
