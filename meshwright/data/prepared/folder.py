"""What lies in a prepared folder, and how it is opened: the manifest, the shards, the tokenizer."""

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from meshwright.data.files import read_json
from meshwright.data.media.files import SourceFile
from meshwright.data.media.index import MediaIndex, ShardItems
from meshwright.data.store import FileTokens, Int64Array, TokenStore, token_dtype
from meshwright.data.tokenizer import LARGEST_VOCABULARY, Tokenizer, load_tokenizer
from meshwright.errors import UserError

FORMAT = 2
MANIFEST, TOKENIZER, PARTIAL = "manifest.json", "tokenizer.json", ".partial"
SPLITS = ("train", "validation")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Content = Literal["text", "conversations", "preferences"]
"""What the documents are; of preferences every two are a pair, the chosen answer first."""


class BadRecord(TypedDict):
    """Documents that could not be used, of one kind."""

    count: Count
    first: Annotated[list[str], Field(min_length=1)]


class FileRecord(_Record):
    """A file as it was written."""

    bytes: Count
    sha256: str


class Part(_Record):
    """A shard's share of one split."""

    tokens: Count = 0
    documents: Count = 0
    text_bytes: Count = 0
    """UTF-8 bytes of the text the tokens stand for."""
    files: dict[str, FileRecord] = {}


class Shard(_Record):
    """What became of one unit of the input."""

    number: Count
    input_bytes: Count
    train: Part
    validation: Part
    bad: dict[str, BadRecord]
    sources: dict[int, tuple[Count, Count]] = {}
    """Tokens of each source in train and in validation; version 0.1 did not write them."""
    formats: dict[int, dict[str, Count]] = {}
    """By file, the conversations or pairs of each format that were recognised in it."""

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
    content: Content = "text"
    formats: dict[str, Count] = {}
    """Conversations or pairs of each format that was recognised."""
    join: str | None = None
    """The field that documents of the first source and those of the others were joined by."""
    fields: dict[str, dict[str, Any]] = {}
    """Pictures, film and sound by name: what of their settings shapes the tokens."""
    validation_fraction: float
    held_out: Literal["documents", "ends"] = "documents"
    """Whether whole documents are held out, or the end of each."""
    dtype: str
    vocab_size: int = Field(gt=0, le=LARGEST_VOCABULARY)
    end_of_text: Count
    tokenizer_sha256: str
    tokens: dict[str, int]
    documents: dict[str, int]
    text_bytes: dict[str, int]
    bad: dict[str, BadRecord]
    shards: list[Shard]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.dtype != token_dtype(self.vocab_size).str or self.end_of_text >= self.vocab_size:
            raise ValueError(f"a vocabulary of {self.vocab_size} does not go with {self.dtype} or {self.end_of_text}")
        for field in ("tokens", "documents", "text_bytes"):
            told = {split: sum(getattr(shard.part(split), field) for shard in self.shards) for split in SPLITS}
            if getattr(self, field) != told:
                raise ValueError(f"{field} are not those of the shards together")
        return self

    def source_tokens(self, sources: int) -> list[tuple[int, int]]:
        """Tokens of each of so many sources in train and in validation."""
        found = [[shard.sources.get(source, (0, 0)) for shard in self.shards] for source in range(sources)]
        return [(sum(train for train, _ in parts), sum(held for _, held in parts)) for parts in found]


@dataclass(frozen=True)
class Prepared:
    """A folder that is whole, opened."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer

    def store(self, split: str) -> "ShardedTokens":
        """All tokens of train or validation, in the order of the input."""
        dtype, vocab_size = self.manifest.dtype, self.manifest.vocab_size
        marked = self.manifest.content != "text" or bool(self.manifest.fields)
        return ShardedTokens(
            [
                FileTokens(
                    self.folder, shard_name(split, shard.number), shard.part(split).tokens, dtype, vocab_size, marked
                )
                for shard in self.manifest.shards
                if shard.part(split).tokens
            ]
        )

    def counted(self) -> dict[str, int]:
        """Pictures, films and sounds of each field, in both splits."""
        indices = [index for split in SPLITS if (index := self.items(split)) is not None]
        counts = [index.counted(len(self.manifest.fields)) for index in indices]
        return dict(zip(self.manifest.fields, map(sum, zip(*counts, strict=True)), strict=True))

    def missing(self) -> list[str]:
        """A sentence for each field that no record has."""
        return [
            f"no record has data.fields.{name}; set its column to the name or ending of what holds it"
            for name, count in self.counted().items()
            if count == 0
        ]

    def items(self, split: str) -> MediaIndex | None:
        """Where the pictures, film and sound of train or validation are; None of text alone."""
        if not self.manifest.fields:
            return None
        files = [SourceFile(file["name"], file["bytes"], file["stamp"]) for file in self.manifest.sources]
        shards, first = [], 0
        for shard in self.manifest.shards:
            if tokens := shard.part(split).tokens:
                shards.append(ShardItems(self.folder, shard_name(split, shard.number), first, files))
                first += tokens
        return MediaIndex(shards)


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
        told = read_json(folder / MANIFEST)
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
    if tokenizer.fingerprint() != manifest.tokenizer_sha256 or tokenizer.vocab_size != manifest.vocab_size:
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
        told = read_json(path)
        found = told.get("format") if isinstance(told, dict) else None
        if found != FORMAT:
            raise UserError(f"{path} has format {found} where {FORMAT} is needed; prepare the folder again")
        return Manifest.model_validate(told)
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}); prepare the folder again") from error


def _require_size(path: Path, size_bytes: int) -> None:
    try:
        status = path.stat()
        found = status.st_size if stat.S_ISREG(status.st_mode) else None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is gone since it was prepared; restore it or prepare the folder again") from error
    if found is None:
        raise UserError(f"{path} is no longer a regular file; restore it or prepare the folder again")
    if found != size_bytes:
        raise UserError(
            f"{path} has {found} bytes where {size_bytes} were written; restore it or prepare the folder again"
        )
