"""A safetensors file written in one pass that hashes what it writes; reading is the safetensors library's.

Written here because the library would hold Python's lock while it writes, and training goes on meanwhile; and because
a hash made of the bytes on their way to the disk needs no second reading.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.records import FileRecord

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
BLOCK_BYTES = 2**24
"""Hashed and written in one go: both let other threads run meanwhile."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write tensors in host memory to a new file and bring it to the disk; returns its size and hash."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for block in _blocks(tensors):
            digest.update(block)
            size += len(block)
            while block:
                block = block[file.write(block) :]
        os.fsync(file.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def hash_file(path: Path) -> str:
    """The hash of a file's bytes."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    # Wide numbers first: each tensor then begins at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        values: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(values), BLOCK_BYTES):
            yield values[start : start + BLOCK_BYTES]
