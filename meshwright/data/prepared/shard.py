"""One unit of the input becomes one shard: read, tokenised, written beside, hashed, put in place."""

import hashlib
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.atomic import sync, write_atomic
from meshwright.data.files import open_regular, read_json
from meshwright.data.grouping import grouped_by_size
from meshwright.data.join import Joined
from meshwright.data.media.examine import Examiner
from meshwright.data.media.index import COPIED, COPIES, ITEMS, NAMED, ItemRow, ItemWriter
from meshwright.data.media.join import follow_media
from meshwright.data.media.tokens import encode_samples
from meshwright.data.prepared.folder import PARTIAL, SPLITS, FileRecord, Part, Shard, shard_name
from meshwright.data.raw import Bad, BadDocuments, Item, MediaTaking, Taking, Text, Unit, in_parts, read_unit
from meshwright.data.raw.bad import EMPTY
from meshwright.data.raw.reading import Watch
from meshwright.data.split import HeldOut
from meshwright.data.store import TokenWriter, token_dtype
from meshwright.data.tokenizer import Tokenizer

BATCH_BYTES = 1 << 20
MEDIA = (ITEMS, COPIES)
Heard = Callable[[int, int], None]
"""Told the good and bad documents just passed."""


@dataclass(frozen=True)
class Work:
    """What is the same for every unit."""

    out: Path
    taking: Taking
    joined: Path | None
    """The file of what is joined to the documents."""
    held_out: HeldOut
    firsts: tuple[int, ...]
    """The number of each unit's first document."""
    inputs: tuple[str, ...] = ()
    """The names of all files, by number."""


def make_shard(
    work: Work,
    unit: Unit,
    tokenizer: Tokenizer,
    joined: Joined | None,
    bad: BadDocuments,
    watch: Watch,
    heard: Heard,
) -> Shard:
    """Write a unit's tokens into the folder, and beside them, last, the record that they are whole.

    The unit's bad documents are added to `bad`, which so tells of them even where the work is stopped half-way.
    """
    out, taking = work.out, work.taking
    beside = out / PARTIAL / f"unit-{unit.number:05d}.{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    writer = _Splits(beside, unit.number, tokenizer, work, marked=taking.whole)
    examiner = Examiner(taking, work.inputs) if isinstance(taking, MediaTaking) else None
    sources: dict[int, tuple[int, int]] = {}
    formats: dict[int, dict[str, int]] = {}
    try:
        for source, pieces in itertools.groupby(unit.pieces, key=lambda piece: piece.file.source):
            before = writer.counts()
            items = read_joined(replace(unit, pieces=tuple(pieces)), taking, joined, watch)
            good = _good(items, bad, heard, examiner)
            for batch in grouped_by_size(good, lambda text: text.held_bytes, BATCH_BYTES):
                if isinstance(taking, MediaTaking):
                    writer.add_media(batch, taking)
                    if taking.chat is not None:
                        _count_formats(batch, formats)
                    continue
                if taking.chat is not None:
                    writer.add_marked(batch)
                    _count_formats(batch, formats)
                    continue
                for text, tokens in zip(batch, tokenizer.encode_batch([text.text for text in batch]), strict=True):
                    writer.add(text, tokens)
            writer.pause()
            after = writer.counts()
            sources[source] = (after[0] - before[0], after[1] - before[1])
        parts = writer.finish(out)
    finally:
        writer.close()
        shutil.rmtree(beside, ignore_errors=True)
    shard = Shard(
        number=unit.number, input_bytes=unit.size_bytes, bad=bad.told(), sources=sources, formats=formats, **parts
    )
    write_atomic(record_path(out, unit.number), shard.model_dump_json(), durable=True)
    return shard


def read_joined(
    unit: Unit, taking: Taking, joined: Joined | None, watch: Watch = lambda read, retries: None
) -> Iterator[Item]:
    """The items of a unit, each document followed by what is joined to it."""
    for item in read_unit(unit, taking, watch):
        if joined is not None and isinstance(taking, MediaTaking) and isinstance(item, Text):
            item = follow_media(joined, item)
        elif joined is not None and isinstance(item, Text) and item.key is not None:
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


def _count_formats(batch: Iterable[Text], formats: dict[int, dict[str, int]]) -> None:
    for text in batch:
        assert text.file is not None and text.shape is not None
        counts = formats.setdefault(text.file, {})
        counts[text.shape] = counts.get(text.shape, 0) + 1


def _good(
    items: Iterable[Text | Bad], bad: BadDocuments, heard: Heard, examiner: Examiner | None = None
) -> Iterator[Text]:
    for item in items:
        if examiner is not None and isinstance(item, Text):
            item = examiner.look(item)
        if isinstance(item, Bad):
            bad.add(item.kind, item.place)
            heard(0, int(item.kind != EMPTY))
        else:
            heard(int(item.ends), 0)
            yield from in_parts(item)


class _Splits:
    """The token files of a shard, one for training and one for validation."""

    def __init__(self, folder: Path, unit: int, tokenizer: Tokenizer, work: Work, *, marked: bool) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        self._folder, self._unit, self._held_out = folder, unit, work.held_out
        self._tokenizer, self._end_of_text = tokenizer, tokenizer.end_of_text
        media = isinstance(work.taking, MediaTaking)
        self._endings = ("bin", "documents.npy", *(["targets.bin"] if marked else []), *(MEDIA if media else ()))
        self._items = {split: ItemWriter(folder, shard_name(split, unit)) for split in (SPLITS if media else ())}
        self._writers = {split: TokenWriter(folder, shard_name(split, unit), dtype, marked=marked) for split in SPLITS}
        self._text_bytes = dict.fromkeys(SPLITS, 0)
        self._number = work.firsts[unit] - 1
        self._split: str | None = None
        self._began_at = self._document_bytes = 0

    def counts(self) -> tuple[int, int]:
        """Tokens for train and for validation so far."""
        train, validation = (self._writers[split].count for split in SPLITS)
        return train, validation

    def add(self, text: Text, tokens: list[int]) -> None:
        """A document, or its next part; the first may go on with one that began in an earlier shard."""
        if text.begins or self._split is None:
            self._number += int(text.begins)
            self._split = "validation" if self._held_out.whole(self._number) else "train"
            self._began_at, self._document_bytes = self._writers[self._split].count, 0
        writer = self._writers[self._split]
        if text.begins:
            writer.begin_document()
        writer.append(tokens)
        self._text_bytes[self._split] += text.size_bytes
        self._document_bytes += text.size_bytes
        if text.ends:
            self.pause()
            writer.append([self._end_of_text])

    def pause(self) -> None:
        """The document at hand has no more text, in this shard at least: hold out its end where that is the rule."""
        if self._split is None:
            return
        self._split = None
        train, validation = (self._writers[split] for split in SPLITS)
        count = self._held_out.end_of(train.count - self._began_at)
        if count:
            validation.begin_document()
            train.move_end(count, validation)
            validation.append([self._end_of_text])
            moved = int(self._document_bytes * self._held_out.fraction)
            self._text_bytes["train"] -= moved
            self._text_bytes["validation"] += moved

    def add_marked(self, batch: Sequence[Text]) -> None:
        """Whole conversations, and pairs of answers: both answers of a pair in the same split, the chosen first."""
        documents = [side for text in batch for side in (text, text.rejected) if side is not None]
        firsts = [first for text in batch for first in ((True, False) if text.rejected else (True,))]
        texts, marks = [text.text for text in documents], [text.marks or () for text in documents]
        encoded = self._tokenizer.encode_marked(texts, marks)
        for text, first, spans, found in zip(documents, firsts, marks, encoded, strict=True):
            self._number += int(first)
            split = "validation" if self._held_out.whole(self._number) else "train"
            self._writers[split].begin_document()
            end_counts = bool(spans) and spans[-1][1] > len(text.text)
            self._writers[split].append(*_with_end(*found, self._end_of_text, end_counts))
            self._text_bytes[split] += text.size_bytes

    def add_media(self, batch: Sequence[Text], taking: MediaTaking) -> None:
        """Whole samples, with placeholders for their items and a row of the table for each of those."""
        for text, encoded in zip(batch, encode_samples(self._tokenizer, batch, taking), strict=True):
            self._number += 1
            split = "validation" if self._held_out.whole(self._number) else "train"
            writer, items = self._writers[split], self._items[split]
            for medium, place in zip(text.media, encoded.places, strict=True):
                file = text.file if medium.file is None else medium.file
                offset, size = medium.offset, medium.size
                if not medium.located:
                    kept = medium.name.encode("utf-8") if medium.data is None else medium.data
                    file, offset, size = NAMED if medium.named else COPIED, items.copy(kept), len(kept)
                assert file is not None
                items.add(ItemRow(writer.count + place, medium.items, file, offset, size, medium.field))
            writer.begin_document()
            writer.append(encoded.tokens, encoded.targets)
            self._text_bytes[split] += text.size_bytes

    def finish(self, out: Path) -> dict[str, Part]:
        """Bring the files to the disk and into the folder; a split without tokens has none."""
        parts = {}
        for items in self._items.values():
            items.finish()
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
        for items in self._items.values():
            items.close()


def _with_end(
    tokens: list[int], targets: list[bool], end_of_text: int, end_counts: bool
) -> tuple[list[int], list[bool]]:
    """A conversation's tokens and what the loss counts of them, behind them the end of text unless they have it."""
    if tokens[-1] == end_of_text:
        return tokens, targets
    return [*tokens, end_of_text], [*targets, end_counts]
