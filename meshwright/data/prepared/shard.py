"""One unit of the input becomes one shard: read, tokenised, written beside, hashed, put in place."""

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from meshwright.atomic import sync, write_atomic
from meshwright.data.files import open_regular, read_json
from meshwright.data.grouping import grouped_by_size
from meshwright.data.hashing import fraction_of, mix
from meshwright.data.join import Joined
from meshwright.data.prepared.folder import PARTIAL, SPLITS, FileRecord, Part, Shard, shard_name
from meshwright.data.raw import Bad, BadDocuments, Item, Taking, Text, Unit, in_parts, read_unit
from meshwright.data.raw.reading import Watch
from meshwright.data.split import with_end
from meshwright.data.store import TokenWriter, token_dtype
from meshwright.data.tokenizer import Tokenizer

BATCH_BYTES = 1 << 20
_DOCUMENTS, _FILES = 0x5EED_0F_D0C5, 0x5EED_0F_F11E
Heard = Callable[[int, int], None]
"""Told the good and bad documents just passed."""


def held_out(unit: int, ordinal: int, file: int | None, fraction: float) -> bool:
    """Whether a document is one of validation's: by its place alone, so that every order of work decides alike."""
    if file is not None:
        return fraction_of(file, _FILES) < fraction
    return fraction_of(ordinal, mix(unit, _DOCUMENTS)) < fraction


def make_shard(
    out: Path,
    unit: Unit,
    tokenizer: Tokenizer,
    taking: Taking,
    joined: Joined | None,
    fraction: float,
    bad: BadDocuments,
    watch: Watch,
    heard: Heard,
) -> Shard:
    """Write a unit's tokens into the folder, and beside them, last, the record that they are whole.

    The unit's bad documents are added to `bad`, which so tells of them even where the work is stopped half-way.
    """
    beside = out / PARTIAL / f"unit-{unit.number:05d}.{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    writer = _Splits(beside, unit.number, tokenizer, fraction, marked=taking.chat is not None)
    try:
        texts = _good(read_joined(unit, taking, joined, watch), bad, heard)
        for batch in grouped_by_size(texts, lambda text: text.size_bytes, BATCH_BYTES):
            if taking.chat is not None:
                writer.add_marked(batch)
                continue
            for text, tokens in zip(batch, tokenizer.encode_batch([text.text for text in batch]), strict=True):
                writer.add(text, tokens)
        parts = writer.finish(out)
    finally:
        writer.close()
        shutil.rmtree(beside, ignore_errors=True)
    shard = Shard(number=unit.number, input_bytes=unit.size_bytes, bad=bad.told(), **parts)
    write_atomic(record_path(out, unit.number), shard.model_dump_json(), durable=True)
    return shard


def read_joined(
    unit: Unit, taking: Taking, joined: Joined | None, watch: Watch = lambda read, retries: None
) -> Iterator[Item]:
    """The items of a unit, each document followed by what is joined to it."""
    for item in read_unit(unit, taking, watch):
        if joined is not None and isinstance(item, Text) and item.key is not None:
            text = joined.follow(item.key, item.text)
            item = item._replace(text=text, size_bytes=len(text.encode("utf-8")))
        yield item


def record_path(out: Path, number: int) -> Path:
    """Where it is written that a shard is finished."""
    return out / PARTIAL / f"{number:05d}.json"


def finished_shard(out: Path, number: int) -> Shard | None:
    """What an earlier, interrupted preparation finished."""
    try:
        return Shard.model_validate(read_json(record_path(out, number)))
    except (OSError, ValueError):
        return None


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes."""
    with io.BufferedReader(open_regular(path)) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _good(items: Iterable[Text | Bad], bad: BadDocuments, heard: Heard) -> Iterator[Text]:
    for item in items:
        if isinstance(item, Bad):
            bad.add(item.kind, item.place)
            heard(0, 1)
        else:
            heard(int(item.ends), 0)
            yield from in_parts(item)


class _Splits:
    """The token files of a shard, one for training and one for validation."""

    def __init__(self, folder: Path, unit: int, tokenizer: Tokenizer, fraction: float, *, marked: bool) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        self._folder, self._unit, self._fraction = folder, unit, fraction
        self._tokenizer, self._end_of_text = tokenizer, tokenizer.end_of_text
        self._endings = ("bin", "documents.npy", *(["targets.bin"] if marked else []))
        self._writers = {split: TokenWriter(folder, shard_name(split, unit), dtype, marked=marked) for split in SPLITS}
        self._text_bytes = dict.fromkeys(SPLITS, 0)
        self._ordinal = 0
        self._split: str | None = None

    def add(self, text: Text, tokens: list[int]) -> None:
        """A document, or its next part; the first may go on with one that began in an earlier shard."""
        if text.begins or self._split is None:
            out = held_out(self._unit, self._ordinal, text.file, self._fraction)
            self._split = "validation" if out else "train"
        writer = self._writers[self._split]
        if text.begins:
            writer.begin_document()
        writer.append([*tokens, self._end_of_text] if text.ends else tokens)
        self._text_bytes[self._split] += text.size_bytes
        if text.ends:
            self._ordinal += 1

    def add_marked(self, batch: Sequence[Text]) -> None:
        """Whole conversations."""
        texts, marks = [text.text for text in batch], [text.marks or () for text in batch]
        for text, spans, found in zip(batch, marks, self._tokenizer.encode_marked(texts, marks), strict=True):
            out = held_out(self._unit, self._ordinal, None, self._fraction)
            split = "validation" if out else "train"
            self._writers[split].begin_document()
            end_counts = bool(spans) and spans[-1][1] > len(text.text)
            self._writers[split].append(*with_end(*found, self._end_of_text, end_counts))
            self._text_bytes[split] += text.size_bytes
            self._ordinal += 1

    def finish(self, out: Path) -> dict[str, Part]:
        """Bring the files to the disk and into the folder; a split without tokens has none."""
        parts = {}
        for split, writer in self._writers.items():
            writer.finish()
            records = {}
            name = shard_name(split, self._unit)
            for file in (f"{name}.{ending}" for ending in self._endings) if writer.count else ():
                path = self._folder / file
                records[file] = FileRecord(bytes=path.stat().st_size, sha256=sha256_of(path))
                path.rename(out / file)
            parts[split] = Part(
                tokens=writer.count,
                documents=writer.documents,
                text_bytes=self._text_bytes[split],
                files=records,
            )
        sync(out)
        return parts

    def close(self) -> None:
        """Let go of the files."""
        for writer in self._writers.values():
            writer.close()
