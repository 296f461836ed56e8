"""What lies in a prepared folder, and how it is opened: the manifest, the shards, the tokenizer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.data.store import FileTokens, Int64Array, TokenStore
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import UserError

FORMAT = 2
MANIFEST, TOKENIZER, PARTIAL = "manifest.json", "tokenizer.json", ".partial"
SPLITS = ("train", "validation")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """A file as it was written."""

    bytes: int
    sha256: str


class Part(_Record):
    """A shard's share of one split."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the text the tokens stand for."""
    files: dict[str, FileRecord] = {}


class Shard(_Record):
    """What became of one unit of the input."""

    number: int
    input_bytes: int
    train: Part
    validation: Part
    bad: dict[str, Any]

    def part(self, split: str) -> Part:
        """The share of train or validation."""
        return self.validation if split == "validation" else self.train


class Manifest(_Record):
    """Everything there is to know of a prepared folder; holds no times, so that equal work gives equal bytes."""

    format: int
    identity: str
    """A hash of the input as it was listed and of every setting that shapes the tokens."""
    sources: list[dict[str, Any]]
    left_out: list[str]
    text_field: str
    content: Literal["text", "conversations"] = "text"
    join: str | None = None
    """The field that documents of the first source and those of the others were joined by."""
    validation_fraction: float
    dtype: str
    vocab_size: int
    end_of_text: int
    tokenizer_sha256: str
    tokens: dict[str, int]
    documents: dict[str, int]
    text_bytes: dict[str, int]
    bad: dict[str, Any]
    shards: list[Shard]


@dataclass(frozen=True)
class Prepared:
    """A folder that is whole, opened."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer

    def store(self, split: str) -> "ShardedTokens":
        """All tokens of train or validation, in the order of the input."""
        dtype, marked = self.manifest.dtype, self.manifest.content == "conversations"
        return ShardedTokens(
            [
                FileTokens(self.folder, shard_name(split, shard.number), shard.part(split).tokens, dtype, marked)
                for shard in self.manifest.shards
                if shard.part(split).tokens
            ]
        )


class ShardedTokens:
    """Stores one behind the other, read as one."""

    def __init__(self, parts: Sequence[TokenStore]) -> None:
        self._parts = list(parts)
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])

    @property
    def parts(self) -> list[TokenStore]:
        """The stores themselves."""
        return list(self._parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> Int64Array:
        """The tokens from start up to stop."""
        found = [part.read(a, b) for part, _, a, b in self._spans(start, stop)]
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int64), *found])

    def starts_between(self, start: int, stop: int) -> Int64Array:
        """Where documents start, start included and stop not."""
        found = [part.starts_between(a, b) + offset for part, offset, a, b in self._spans(start, stop)]
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int64), *found])

    def targets(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Which of the tokens the loss counts; None where it counts all."""
        if not self._parts or self._parts[0].targets(0, 0) is None:
            return None
        found = [part.targets(a, b) for part, _, a, b in self._spans(start, stop)]
        return np.concatenate([np.empty(0, np.bool_), *(part for part in found if part is not None)])

    def _spans(self, start: int, stop: int) -> list[tuple[TokenStore, int, int, int]]:
        stop = min(stop, len(self))
        first = max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)
        spans = []
        for number in range(first, len(self._parts)):
            offset = int(self._starts[number])
            if offset >= stop:
                break
            spans.append(
                (self._parts[number], offset, max(0, start - offset), min(stop, self._starts[number + 1]) - offset)
            )
        return [(part, offset, a, int(b)) for part, offset, a, b in spans if b > a]


def shard_name(split: str, number: int) -> str:
    """The name of a shard's files, without their endings."""
    return f"{split}-{number:05d}"


def is_prepared(name: str) -> bool:
    """Whether a source is a folder that `meshwright data prepare` made, finished or not."""
    folder = Path(name).expanduser()
    if (folder / PARTIAL / "plan.json").is_file():
        return True
    try:
        told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and "shards" in told and "tokenizer_sha256" in told


def open_prepared(folder: Path) -> Prepared:
    """Open a finished folder; what is missing, of another format or does not fit together is refused."""
    manifest = read_manifest(folder)
    for shard in manifest.shards:
        for split in SPLITS:
            for name, record in shard.part(split).files.items():
                _require_size(folder / name, record.bytes)
    tokenizer = load_tokenizer(folder / TOKENIZER, f"{folder}")
    if tokenizer.fingerprint() != manifest.tokenizer_sha256:
        raise UserError(
            f"{folder / TOKENIZER} is not the tokenizer that made the tokens beside it; put the right one back or "
            "prepare the folder again"
        )
    return Prepared(folder, manifest, tokenizer)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder."""
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / PARTIAL).is_dir():
            raise UserError(f"{folder} was not prepared to its end; run the same meshwright data prepare again")
        raise UserError(
            f"{folder} is not a prepared folder (it has no {MANIFEST}); make one with meshwright data prepare"
        )
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        found = told.get("format") if isinstance(told, dict) else None
        if found != FORMAT:
            raise UserError(f"{path} has format {found} where {FORMAT} is needed; prepare the folder again")
        return Manifest.model_validate(told)
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}); prepare the folder again") from error


def _require_size(path: Path, size_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} is gone since it was prepared; restore it or prepare the folder again") from error
    if found != size_bytes:
        raise UserError(
            f"{path} has {found} bytes where {size_bytes} were written; restore it or prepare the folder again"
        )
