"""Which files a list of sources stands for, and what is in each: by name, by folder, by address."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar, cast

from meshwright.data.files import open_regular, read_json
from meshwright.data.raw.energon import is_energon, training_shards
from meshwright.data.raw.extras import need
from meshwright.data.raw.local import STDLIB, SYNTHETIC, regular_inside, stdlib_files, unreadable, walk
from meshwright.data.raw.remote import RemoteEntry, RemoteFile, is_remote, list_remote
from meshwright.errors import UserError
from meshwright.job.sanitize import without_secrets

Format = Literal["text", "jsonl", "csv", "tsv", "parquet", "arrow", "tar"]
Compression = Literal["none", "gz", "zst"]
T = TypeVar("T")

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
}
_TEXT_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("txt", "text", "md", "markdown", "rst", "tex", "html", "htm", "xml", "toml", "yaml", "yml"),
        *("py", "pyi", "ipynb", "c", "h", "cc", "cpp", "hpp", "cu", "rs", "go", "js", "ts", "java", "kt", "scala"),
        *("rb", "php", "sh", "sql", "lua", "jl", "r", "swift", "hs", "ml"),
    )
)
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
# How Hugging Face names the files of a split: train-00000-of-00004.parquet.
_SPLIT = re.compile(r"(?:^|/)([A-Za-z0-9_.]+)-\d{5}-of-\d{5}[^/]*$")
_PACKED = ("parquet", "arrow")
"""Formats that compress inside."""
_NAMED = 3
"""So many of the files that were left out are named."""
_OFFERED = "text, .jsonl, .csv, .tsv, .parquet, .arrow or .tar files, plain or .gz or .zst"


@dataclass(frozen=True)
class InputFile:
    """One file to read, as it was when listed."""

    name: str
    size_bytes: int
    stamp: str
    format: Format
    compression: Compression
    remote: RemoteEntry | None = None
    skip_if_not_utf8: bool = False
    source: int = 0
    """The place in the list of sources of the one it belongs to."""

    @property
    def seekable(self) -> bool:
        """Whether a reader can start in the middle."""
        return self.compression == "none" and (self.remote is None or self.remote.ranges)

    def open(self, on_retry: Callable[[], None] = lambda: None) -> BinaryIO:
        """The bytes as they lie, unbuffered."""
        try:
            if self.remote is None:
                return cast(BinaryIO, open_regular(Path(self.name)))
        except OSError as error:
            raise unreadable(self.name, error) from error
        return cast(BinaryIO, RemoteFile(self.remote, on_retry))

    def require_unchanged(self) -> None:
        """Refuse a file that is not the one that was listed any more."""
        if self.remote is not None:
            RemoteFile(self.remote).require_unchanged()
        elif _state(Path(self.name)) != (self.size_bytes, self.stamp):
            raise UserError(f"{self.name} changed while it was read; start again when nothing writes to it")


@dataclass(frozen=True)
class Inputs:
    """Every file of the sources in a fixed order, and those that were left out on purpose."""

    files: tuple[InputFile, ...]
    left_out: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """All files together, as they lie."""
        return sum(file.size_bytes for file in self.files)

    @property
    def most_tokens(self) -> int | None:
        """More tokens than this cannot be in the files; None if some are compressed or of unknown size."""
        plain = all(
            file.compression == "none" and file.format not in _PACKED and file.size_bytes for file in self.files
        )
        return self.size_bytes + len(self.files) if plain else None

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence about what was left out, if anything was, so that nothing is missing silently."""
        if not self.left_out:
            return ()
        more = f" and {len(self.left_out) - _NAMED} more" if len(self.left_out) > _NAMED else ""
        names = ", ".join(self.left_out[:_NAMED])
        return (f"left out of data.sources, being of no known kind or of another split: {names}{more}",)


def list_inputs(sources: Sequence[str]) -> Inputs:
    """The files of paths, folders, Hugging Face dataset folders, addresses and `builtin:stdlib`."""
    files: list[InputFile] = []
    left_out: list[str] = []
    for place, source in enumerate(sources):
        found, others = _remote_files(source) if is_remote(source) else _local_files(source)
        files += [replace(file, source=place) for file in found]
        left_out += others
    _require_readers(files)
    return Inputs(tuple(files), tuple(left_out))


def _require_readers(files: Sequence[InputFile]) -> None:
    """Refuse what no installed package can read before anything is done; workers forked later have them loaded."""
    needed = {"parquet": "pyarrow.parquet", "arrow": "pyarrow", "zst": "pyarrow"}
    for file in files:
        for kind in {file.format, file.compression} & needed.keys():
            need(needed[kind], file.name)


def _local_files(source: str) -> tuple[list[InputFile], list[str]]:
    if source.startswith("builtin:"):
        return _builtin_files(source), []
    path = Path(os.path.realpath(Path(source).expanduser()))  # Path.resolve raises for a loop of links
    if path.is_dir():
        saved = _saved_dataset(path)
        if saved is not None:
            return [_local(file, "arrow") for file in saved], []
        if is_energon(source):
            return [_local(file) for file in regular_inside(training_shards(path), path)], []
        names, left_out = _train_split([str(file) for file in walk(path)])
        paths = regular_inside([Path(name) for name in names if kind_of(name) is not None], path)
        if not paths:
            raise UserError(f"the folder {path} holds no {_OFFERED}; name another")
        return [_local(file) for file in paths], left_out + [name for name in names if kind_of(name) is None]
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file or folder; correct the path")
    return [_local(path)], []


def _builtin_files(source: str) -> list[InputFile]:
    if source != STDLIB:
        raise UserError(f'"{source}" holds no files to read; choose {STDLIB}, or {SYNTHETIC} alone in a job')
    return [replace(_local(path), skip_if_not_utf8=True) for path in stdlib_files()]


def _remote_files(source: str) -> tuple[list[InputFile], list[str]]:
    entries = {entry.url: entry for entry in list_remote(source)}
    names, left_out = _train_split(list(entries))
    if len(entries) > 1:
        left_out += [name for name in names if kind_of(name) is None]
        names = [name for name in names if kind_of(name) is not None]
    if not names:
        raise UserError(f"{source} holds no {_OFFERED}; name another")
    # What is written down of a file is its name, which a signature or a password is no part of.
    return [
        _file(without_secrets(name), entries[name].size_bytes or 0, entries[name].stamp, entries[name])
        for name in names
    ], list(map(without_secrets, left_out))


def _local(path: Path, format: Format | None = None) -> InputFile:
    size_bytes, stamp = _state(path)
    return _file(str(path), size_bytes, stamp, format=format)


def _file(
    name: str, size_bytes: int, stamp: str, remote: RemoteEntry | None = None, format: Format | None = None
) -> InputFile:
    kind: tuple[Format, Compression] | None
    kind = (format, "none") if format else kind_of(name.partition("?")[0] if remote else name)
    if kind is None and remote is None and Path(name).suffix.lower() not in _COMPRESSIONS:
        kind = ("text", "none")  # whoever names a file knows what it is
    if kind is None:
        raise UserError(f"{name} is not a supported kind of file; give {_OFFERED}")
    return InputFile(name, size_bytes, stamp, *kind, remote)


def _state(path: Path) -> tuple[int, str]:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(str(path), error) from error
    return status.st_size, str(status.st_mtime_ns)


def kind_of(name: str) -> tuple[Format, Compression] | None:
    """What a file holds and how it is compressed, by its name."""
    lower = name.lower()
    if lower.endswith((".tgz", ".tar.gz")):
        return "tar", "gz"
    stem = lower
    compression: Compression = "none"
    for suffix, packed in _COMPRESSIONS.items():
        if lower.endswith(suffix):
            stem, compression = lower.removesuffix(suffix), packed
    suffix = Path(stem).suffix
    if suffix in _FORMATS:
        if _FORMATS[suffix] in _PACKED and compression != "none":
            return None  # both need to be read from their end, and compress inside
        return _FORMATS[suffix], compression
    return ("text", compression) if suffix in _TEXT_SUFFIXES else None


def _train_split(names: list[str]) -> tuple[list[str], list[str]]:
    """Of files named as Hugging Face names splits only those of the training split; all others as they are."""
    splits = {name: match.group(1).rpartition("/")[2] for name in names if (match := _SPLIT.search(name))}
    if "train" not in splits.values():
        return names, []
    return [name for name in names if splits.get(name) == "train"], [n for n in names if splits.get(n) != "train"]


def _saved_dataset(folder: Path) -> list[Path] | None:
    """The files of a dataset that `datasets` saved to disk; of several splits the one named train."""
    if (folder / "dataset_dict.json").is_file():
        splits = _listed_in(folder / "dataset_dict.json", "splits", str)
        if "train" not in splits:
            raise UserError(
                f"{folder} has no split named train, only {', '.join(splits[:5]) or 'none'}; name one of its folders"
            )
        folder = folder / "train"
    state = folder / "state.json"
    if not state.is_file():
        return None
    if _listed_in(state, "_indices_files", object):
        raise UserError(
            f"{folder} holds a selection of rows beside the rows (_indices_files in state.json); call "
            "flatten_indices() on the dataset and save it again"
        )
    files = []
    for entry in _listed_in(state, "_data_files", dict):
        name = entry.get("filename")
        if not isinstance(name, str) or Path(name).name != name or not _is_file(folder / name):
            raise UserError(
                f"{state} names the file {str(name)[:100]!r}, which does not lie beside it; save the dataset again"
            )
        files.append(folder / name)
    if not files:
        raise UserError(f"{state} names no files of rows; save the dataset again")
    return regular_inside(files, folder)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except ValueError:  # a NUL in the name
        return False


def _listed_in(path: Path, field: str, kind: type[T]) -> list[T]:
    """A list in a file that `datasets` wrote, all of one kind; an empty one where there is none."""
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise unreadable(str(path), error) from error
    found = value.get(field) or [] if isinstance(value, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, kind) for entry in found):
        raise UserError(f"{path} is not what datasets writes there (see {field}); save the dataset again")
    return found


def identity_of(files: Sequence[InputFile]) -> Iterator[list[str | int]]:
    """What tells whether the same input is read again."""
    for file in files:
        yield [file.name, file.size_bytes, file.stamp]
