"""Reading a checkpoint: any box of any tensor, from whatever boxes it was saved in. Nothing is ever unpickled."""

import math
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.records import FORMAT, Facts, Index, Manifest, PieceRecord, Record, TensorRecord, is_whole
from meshwright.checkpoint.shares import INDEX, JOB, MANIFEST, seal_of
from meshwright.checkpoint.tensorfile import DTYPE_NAMES, hash_file
from meshwright.errors import UserError
from meshwright.reading import Unfit, read_object, read_plain

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
RECORD_BYTES = 1 << 28
"""Size limit of an index or a manifest: enough for some million boxes."""
R = TypeVar("R", bound=Record)


class Damaged(UserError):
    """A checkpoint that differs from what was written; the message is one sentence that names it."""

    path: Path
    """Its folder, where it was found among a run's checkpoints."""


class Checkpoint:
    """A complete checkpoint: `open` refuses an incomplete or foreign one, `verify` one whose bytes changed."""

    def __init__(self, path: Path, manifest: Manifest, index: Index) -> None:
        """Use `open`."""
        self.path, self.manifest, self.index = path, manifest, index
        self._files: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path) -> Self:
        """Check a folder's manifest, names and sizes, and its index; `verify` checks the tensors' bytes."""
        path = Path(path)
        with _disk_errors(path):
            manifest = parse_manifest(path)
            _require_files(path, manifest)
            if hash_file(path / INDEX) != manifest.files[INDEX].sha256:
                raise Damaged(f"{path / INDEX} was modified after it was written")
            index = _parsed(path / INDEX, Index)
        _require_tensors(path, manifest, index)
        if (index.facts.step, index.attempt) != (manifest.step, manifest.attempt):
            raise Damaged(f"{path} has the index of another checkpoint")
        return cls(path, manifest, index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._files.clear()

    @property
    def facts(self) -> Facts:
        """The run's progress at this checkpoint."""
        return self.index.facts

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(record.bytes for record in self.manifest.files.values())

    def job(self) -> dict[str, Any]:
        """The job as it was when this was saved: section → field → value."""
        if hash_file(self.path / JOB) != self.manifest.files[JOB].sha256:
            raise Damaged(f"{self.path / JOB} was modified after it was written")
        try:
            loaded = read_object(self.path / JOB)
            if not all(isinstance(section, dict) for section in loaded.values()):
                raise Unfit("it has no job sections")
        except (Unfit, OSError) as error:
            raise Damaged(f"{self.path / JOB} is not in the format this program writes ({error})") from None
        return loaded

    def names(self, prefix: str = "") -> list[str]:
        """The tensors whose names start with this prefix."""
        return [name for name in self.index.tensors if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of a tensor."""
        return self.index.tensors[name].shape

    def verify(self, share: int = 0, shares: int = 1, group: str = "") -> None:
        """Hash every file, or one group's, or one of several equal shares of them, and refuse modified ones."""
        names = sorted(name for name in self.manifest.files if name.startswith(group))[share::shares]
        with _disk_errors(self.path), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            hashes = pool.map(lambda name: hash_file(self.path / name), names)
            altered = [
                name for name, found in zip(names, hashes, strict=True) if found != self.manifest.files[name].sha256
            ]
        if altered:
            raise Damaged(f"{self.path / altered[0]} was modified after it was written (its hash differs)")

    def whole(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.read(name, tuple(slice(0, size) for size in self.shape(name)))

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """A box of a tensor, a slice with both ends for every dim, as a contiguous copy."""
        record, wanted = self.index.tensors[name], [(span.start, span.stop) for span in box]
        result = torch.empty([stop - start for start, stop in wanted], dtype=_DTYPES[record.dtype], device="meta")
        for piece in record.pieces:
            shared = [
                (max(start, at), min(stop, at + size))
                for (start, stop), at, size in zip(wanted, piece.offsets, piece.shape, strict=True)
            ]
            if not all(start < stop for start, stop in shared):
                continue
            there = tuple(slice(a - at, b - at) for (a, b), at in zip(shared, piece.offsets, strict=True))
            found = self._piece(name, piece, there)
            if shared == wanted:  # all of it, and no second copy
                return found
            if result.is_meta:
                result = torch.empty_like(result, device="cpu")
            result[tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(shared, wanted, strict=True))] = found
        return torch.empty_like(result, device="cpu") if result.is_meta else result  # an empty tensor has no boxes

    def _piece(self, name: str, piece: PieceRecord, box: tuple[slice, ...]) -> Tensor:
        path, rest = self.path / piece.file, name.partition("/")[2]
        whole = piece.shape == self.shape(name)
        key = rest if whole else f"{rest}@{','.join(map(str, piece.offsets))}"
        try:
            file = self._files.get(piece.file) or self._opened(piece.file)
            # Whole rows are requested by their first dim only: the library then copies them as one block.
            rows = box[:1] if box[1:] == tuple(slice(0, size) for size in piece.shape[1:]) else box
            found: Tensor = file.get_slice(key)[rows] if box else file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise Damaged(f"{path} cannot be read ({error})") from None
        # Some columns come as a view of whole rows; fused updates on the CPU read a tensor as contiguous memory.
        return found.contiguous()

    def _opened(self, name: str) -> Any:
        file: Any = safe_open(self.path / name, framework="pt")
        self._files[name] = file
        if file.metadata():
            raise Damaged(f"{self.path / name} has entries besides its tensors, which this program never writes")
        return file


def differences(one: Checkpoint, other: Checkpoint) -> Iterator[tuple[str, str]]:
    """Every tensor that is not bit-equal in two checkpoints, with what differs."""
    for name in sorted({*one.names(), *other.names()}):
        if name not in one.index.tensors or name not in other.index.tensors:
            yield name, f"only in {(one if name in one.index.tensors else other).path.name}"
            continue
        a, b = one.index.tensors[name], other.index.tensors[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield name, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        elif math.prod(a.shape):
            first, second = one.whole(name), other.whole(name)
            if not torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8)):
                largest = (first.double() - second.double()).abs().max().item()
                yield name, f"largest difference {largest:.3g}"


def parse_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's folder, as this program wrote it."""
    if not os.path.lexists(path / MANIFEST):
        raise Damaged(f"{path} has no {MANIFEST}: the save did not finish, or the file was deleted")
    manifest = _parsed(path / MANIFEST, Manifest)
    if manifest.format != FORMAT:
        raise Damaged(f"{path} has format {manifest.format}, but this version reads {FORMAT}")
    if manifest.seal != seal_of(manifest):
        raise Damaged(f"{path / MANIFEST} was modified after it was written (its seal differs)")
    if path.name != f"step-{manifest.step:08d}":
        raise Damaged(f"{path} holds the state of step {manifest.step}: it is a copy under another step's name")
    return manifest


def _require_files(path: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        file = path / name
        try:
            found = file.lstat()
        except FileNotFoundError:
            raise Damaged(f"{file} is missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{file} is not a regular file")
        if found.st_size != record.bytes:
            raise Damaged(
                f"{file} has {found.st_size} bytes but was written with {record.bytes}: it is truncated or modified"
            )
    for entry in path.iterdir():
        if entry.name != MANIFEST and entry.name not in manifest.files:
            raise Damaged(f"{entry} is not a file of this checkpoint; nothing in it was read")
    for needed in (INDEX, JOB):
        if needed not in manifest.files:
            raise Damaged(f"{path} has no {needed}")


def _require_tensors(path: Path, manifest: Manifest, index: Index) -> None:
    """Refuse an index whose boxes do not match its tensors: whoever writes one can also seal it."""
    room = {name: record.bytes for name, record in manifest.files.items()}
    for name, tensor in index.tensors.items():
        if tensor.dtype not in _DTYPES or not _fits(tensor, room):
            raise Damaged(
                f"{path / INDEX} is not in the format this program writes (tensors.{name} is not a tensor of its files)"
            )


def _fits(tensor: TensorRecord, room: dict[str, int]) -> bool:
    """Whether boxes cover a tensor exactly once and fit in their files."""
    if not is_whole(tensor):
        return False
    for piece in tensor.pieces:
        if piece.file not in room:
            return False
        room[piece.file] -= math.prod(piece.shape) * _DTYPES[tensor.dtype].itemsize
        if room[piece.file] < 0:
            return False
    return True


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """A read error is damage; a missing permission is for the user to fix, and no reason to use an older one."""
    try:
        yield
    except PermissionError as error:
        raise UserError(
            f"{error.filename or path} cannot be read ({error.strerror}); give your user permission to read the run "
            "folder"
        ) from None
    except OSError as error:
        raise Damaged(f"{error.filename or path} cannot be read ({error.strerror})") from None


def _parsed(path: Path, record: type[R]) -> R:
    try:
        return record.model_validate_json(read_plain(path, RECORD_BYTES))
    except Unfit as unfit:
        if isinstance(unfit.__cause__, PermissionError):
            raise unfit.__cause__ from None
        raise Damaged(f"{path} is not in the format this program writes ({unfit})") from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(place) for place in problem["loc"])
        report = f"{where}: {problem['msg']}" if where else problem["msg"]
        raise Damaged(f"{path} is not in the format this program writes ({report})") from None
