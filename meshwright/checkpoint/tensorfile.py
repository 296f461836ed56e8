"""Safetensors files: written in one pass that hashes what it writes, read a few rows at a time.

Written here because the library would hold the GIL while it writes, and training continues meanwhile; because
hashing the bytes as they are written needs no second read; and because no tensor is held whole.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.records import FileRecord
from meshwright.errors import UserError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BLOCK_BYTES = 2**23
"""Converted, hashed and written at once, without the GIL; a longer row is held whole."""

Report = Callable[[int], None]


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: what it will be, and a function that gives any of its rows."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[slice], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Self:
        """One that is in host memory; a number alone is a row."""
        values = tensor.detach()
        return cls(name, tuple(tensor.shape), tensor.dtype, (values if values.dim() else values.view(1)).__getitem__)

    @property
    def bytes(self) -> int:
        """What it takes in the file."""
        return prod(self.size) * self.dtype.itemsize

    def blocks(self) -> Iterator[memoryview]:
        """Its bytes, a few rows at a time."""
        count = self.size[0] if self.size else 1
        step = max(1, BLOCK_BYTES * count // max(1, self.bytes))
        for first in range(0, count, step):
            rows = self.rows(slice(first, min(first + step, count)))
            yield rows.to(self.dtype).contiguous().view(-1).view(torch.uint8).numpy().data


def write_safetensors(
    path: Path,
    tensors: Sequence[Planned],
    metadata: Mapping[str, str] | None = None,
    report: Report = lambda done: None,
) -> FileRecord:
    """Write tensors to a new file and sync it; report(bytes) is called as it progresses. Returns its size and hash."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for number, block in enumerate(_blocks(tensors, metadata or {})):
            digest.update(block)
            size += len(block)
            if number > 0:  # the header belongs to no tensor
                report(len(block))
            while block:
                block = block[file.write(block) :]
        os.fsync(file.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def _blocks(tensors: Sequence[Planned], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    # Wide numbers first: each tensor then starts at a multiple of its own width.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.bytes
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.size),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in ordered:
        yield from tensor.blocks()


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, as the file's header describes it."""

    size: tuple[int, ...]
    dtype: str


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """A file's tensors by name, and its metadata; a truncated or foreign file is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            entries = {name: Entry(tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
            return entries, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def read_window(path: Path, name: str, take: Callable[..., Tensor]) -> Tensor:
    """What `take` slices out of a tensor of a file."""
    # Opened for every read: what was read stays mapped while the file is open, and would count as used memory.
    try:
        with safe_open(path, framework="pt") as file:
            return take(file.get_slice(name))
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def hash_file(path: Path) -> str:
    """The hash of a file's bytes."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read ({error}): it is truncated or not a safetensors file; download it again")
