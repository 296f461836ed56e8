"""Safetensors files a few rows at a time, read and written: no tensor has to be in memory whole."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import UserError

BLOCK_BYTES = 8 * 2**20
"""How much of a tensor is held at a time; a row that is longer is held whole."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Report = Callable[[int], None]


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, as the file's header tells it."""

    size: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: what it will be, and a function that gives any of its rows."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[slice], Tensor]

    @property
    def bytes(self) -> int:
        """What it takes in the file."""
        return prod(self.size) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """A file's tensors by name, and its metadata; one that is torn or no safetensors file is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            entries = {name: Entry(tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
            return entries, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def read_window(path: Path, name: str, take: Callable[..., Tensor]) -> Tensor:
    """What `take` slices out of a tensor of a file."""
    # Opened for every read: what was read stays mapped as long as a file is open, and would count as memory held.
    try:
        with safe_open(path, framework="pt") as file:
            return take(file.get_slice(name))
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def write_safetensors(
    path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str], report: Report = lambda done: None
) -> None:
    """Write tensors one after the other, block by block; report(bytes) follows it."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.bytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.size),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            step = max(1, BLOCK_BYTES * tensor.size[0] // max(1, tensor.bytes))
            for first in range(0, tensor.size[0], step):
                rows = tensor.rows(slice(first, min(first + step, tensor.size[0])))
                block = rows.to(tensor.dtype).contiguous().view(torch.uint8)
                file.write(block.numpy().data)
                report(block.numel())


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read ({error}); it is torn or no safetensors file, get it again")
