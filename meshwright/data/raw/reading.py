"""The documents of a unit, one after the other, good and bad, with nothing held but the one at hand."""

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from meshwright.data.lines import LONGEST_RECORD_BYTES, lines_of
from meshwright.data.raw.archives import samples_of
from meshwright.data.raw.bad import EMPTY, NOT_UTF8, TOO_LONG, WRONG_FIELD
from meshwright.data.raw.columns import DELIMITERS, RowLines, delimited
from meshwright.data.raw.damage import damage_named
from meshwright.data.raw.inputs import InputFile
from meshwright.data.raw.items import BOM, Bad, Item, Taking, Text, checked, from_bytes
from meshwright.data.raw.media import MediaTaking, media_beside
from meshwright.data.raw.packed import unpacked
from meshwright.data.raw.tables import table_rows
from meshwright.data.raw.units import Piece, Unit
from meshwright.errors import UserError

TEXT_BYTES = 1 << 20
"""A longer text file is handed on in pieces of this size."""
_LOOK_AHEAD_BYTES = 1 << 16

Watch = Callable[[int, int], None]
"""Told the bytes just read from the input and the retries just made."""


def read_unit(unit: Unit, taking: Taking, watch: Watch = lambda read, retries: None, skip: int = 0) -> Iterator[Item]:
    """The items of a unit in order; the first `skip` of them are passed over as cheaply as their format allows."""
    for piece in unit.pieces:
        counted, first = 0, None
        for item in _read_piece(piece, taking, watch):
            counted += 1
            if counted > skip:
                made = item() if callable(item) else item
                if isinstance(made, Text) and made.shape is not None:
                    first = first or made
                    require_one_shape(piece.file.name, first, made)
                    made = made._replace(file=piece.number)
                elif isinstance(made, Text) and made.media:
                    made = made._replace(file=piece.number)
                yield made
        skip = max(0, skip - counted)
        piece.file.require_unchanged()


def require_one_shape(name: str, one: Text, other: Text) -> None:
    """Refuse a file in which records of two formats follow each other: one of them is a mistake."""
    if one.shape != other.shape:
        raise UserError(
            f"{name} mixes two formats, {one.shape} at {one.where} and {other.shape} at {other.where}; give each a "
            "file of its own, or rewrite one as the other"
        )


def in_parts(text: Text) -> Iterator[Text]:
    """A very long document in parts that a tokenizer can hold, cut between words; a conversation stays whole."""
    rest, begins = text, text.begins
    while text.marks is None and len(rest.text) > 2 * TEXT_BYTES:
        cut = max(rest.text.rfind(sign, 1, TEXT_BYTES) for sign in "\n ")
        cut = cut if cut > 0 else TEXT_BYTES
        part = rest.text[:cut]
        size_bytes = len(part.encode("utf-8"))
        yield rest._replace(text=part, size_bytes=size_bytes, begins=begins, ends=False)
        rest, begins = rest._replace(text=rest.text[cut:], size_bytes=rest.size_bytes - size_bytes), False
    yield rest._replace(begins=begins)


def _read_piece(piece: Piece, taking: Taking, watch: Watch) -> Iterator[Item | Callable[[], Item]]:
    file, taking = piece.file, taking.for_file(piece.file.name)
    with damage_named(file.name), _Watched(file.open(lambda: watch(0, 1)), watch) as raw:
        if file.format in ("parquet", "arrow"):
            if not file.seekable and file.format == "parquet":
                raise UserError(f"{file.name} is on a server that does not support range requests; download it first")
            yield from _table(piece, cast(BinaryIO, raw), taking)
            return
        with unpacked(cast(BinaryIO, raw), file.compression, file.name) as stream:
            if file.format == "text":
                if isinstance(taking, MediaTaking) and taking.chat is None and piece.whole:
                    yield _text_with_media(file, stream, taking)
                    return
                if not taking.plain:
                    raise UserError(
                        f"{file.name} is plain text, in which there are no fields; give .jsonl, .csv, .parquet, "
                        ".arrow or .tar files"
                    )
                yield from _text(piece, stream)
            elif file.format == "jsonl":
                yield from _jsonl(piece, stream, taking)
            elif file.format == "tar":
                # What comes over a network is not fetched twice to be checked.
                held = not file.seekable or file.remote is not None
                yield from samples_of(file.name, stream, taking, held, file.seekable)
            else:
                yield from _csv(file, stream, taking)


class _Watched(io.RawIOBase):
    """A stream that tells how much was read of it."""

    def __init__(self, inner: BinaryIO, watch: Watch) -> None:
        super().__init__()
        self._inner, self._watch = inner, watch

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._inner.seekable()

    def tell(self) -> int:
        return self._inner.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._inner.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        count: int = cast(Any, self._inner).readinto(buffer)
        self._watch(count, 0)
        return count

    def close(self) -> None:
        self._inner.close()
        super().close()


# ---- lines ----


def _go_to_line(piece: Piece, stream: BinaryIO) -> int:
    """Stand at the first line that starts in the piece; the place reached."""
    if piece.first:
        return 0
    stream.seek(piece.start - 1)
    place = piece.start - 1
    while part := stream.readline(TEXT_BYTES):
        place += len(part)
        if part.endswith(b"\n"):
            break
    return place


def _jsonl(piece: Piece, stream: io.BufferedReader, taking: Taking) -> Iterator[Item | Callable[[], Item]]:
    place = _go_to_line(piece, stream)
    # A piece that is not the first cannot know how many lines came before it.
    name, plain = piece.file.name, piece.file.compression == "none"
    for line in lines_of(stream, place):
        if plain and not piece.whole and line.place >= piece.stop:
            return
        where = f"{name}:{line.number}" if piece.first else f"{name} at byte {line.place}"
        if line.raw is None:
            yield Bad(TOO_LONG, where)
        else:
            yield lambda raw=line.raw, where=where: taking.from_json(raw, where)  # type: ignore[misc]


# ---- text files: one document each, in pieces when long ----


def _text(piece: Piece, stream: BinaryIO) -> Iterator[Item]:
    name, size = piece.file.name, piece.file.size_bytes
    place, stop = 0, None
    if not piece.whole:
        place, stop = (_boundary(stream, offset, size) for offset in (piece.start, piece.stop))
        stream.seek(place)
    last_part = stop is None or stop == size
    begins, held, at_end = piece.first, b"", False
    while not at_end:
        wanted = TEXT_BYTES if stop is None else max(0, min(TEXT_BYTES, stop - place - len(held)))
        part = stream.read(wanted)
        at_end = len(part) < TEXT_BYTES
        held += part
        cut = len(held) if at_end else _cut(held)
        raw, held = held[:cut], held[cut:]
        ends = at_end and last_part
        text: str | None
        try:
            text = raw.removeprefix(BOM if place == 0 else b"").decode("utf-8")
        except UnicodeDecodeError as error:
            if piece.file.skip_if_not_utf8:
                return
            yield Bad(NOT_UTF8, name if begins and ends else f"{name} at byte {place + error.start}")
            text = "" if not begins and ends else None
        blank = text is not None and (not text or text.isspace())
        if begins and blank:
            # A file of white space alone is no document, and a piece of nothing else before a text no part of one.
            if ends:
                yield Bad(EMPTY, name)
        elif text or (text is not None and ends):
            yield Text(text, len(raw), begins, ends, piece.number)
            begins = False
        place += len(raw)


def _text_with_media(file: InputFile, stream: BinaryIO, taking: MediaTaking) -> Item:
    """A text file and what lies beside it under the same name."""
    raw = stream.read(TEXT_BYTES + 1)
    if len(raw) > TEXT_BYTES:
        return Bad(TOO_LONG, file.name)
    members = [] if file.remote is not None else media_beside(taking, Path(file.name))
    return taking.from_members([("txt", raw)], members, file.name)


def _boundary(stream: BinaryIO, offset: int, size: int) -> int:
    """Where a text file is parted near an offset: the same for the part before it and the part behind it."""
    if offset in (0, size):
        return offset
    stream.seek(offset)
    ahead = stream.read(_LOOK_AHEAD_BYTES)
    for sign in (b"\n", b" "):
        if (found := ahead.find(sign)) >= 0:
            return offset + found + (sign == b"\n")
    return offset + next((i for i, byte in enumerate(ahead) if byte & 0xC0 != 0x80), 0)


def _cut(raw: bytes) -> int:
    """Where a piece of text ends: behind its last line, else before its last space, else between characters."""
    line = raw.rfind(b"\n", 0, len(raw) - 1) + 1
    if line:
        return line
    space = raw.rfind(b" ", 1)
    if space > 0:
        return space
    cut = len(raw)
    while cut > len(raw) - 4 and raw[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1


# ---- tables and archives ----


def _table(piece: Piece, stream: BinaryIO, taking: Taking) -> Iterator[Item]:
    file = piece.file
    stop = 1 << 62 if piece.whole else piece.stop
    # Buffered, since pyarrow takes a short read for the end of the file.
    buffered = cast(BinaryIO, io.BufferedReader(cast(Any, stream), 1 << 16))
    for row, record in enumerate(table_rows(file, buffered, piece.start, stop, taking), start=1):
        where = f"{file.name} row {row}" if piece.first else f"{file.name} row {row} from group {piece.start} on"
        if isinstance(record, dict):
            yield taking.from_record(record, where)
        elif record is None:
            yield Bad(EMPTY, where)
        elif len(record) > LONGEST_RECORD_BYTES:
            yield Bad(TOO_LONG, where)
        else:
            yield from_bytes(record, where)


def _csv(file: InputFile, stream: BinaryIO, taking: Taking) -> Iterator[Item]:
    csv.field_size_limit(LONGEST_RECORD_BYTES)
    lines = RowLines(io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=""), file.name)
    first = lines.first_row()
    delimiter, header = delimited(first, "\t" if file.format == "tsv" else DELIMITERS, file.name, taking)
    rows = csv.reader(lines, delimiter=delimiter)
    column = header.index(taking.text_field) if taking.chat is None else 0
    for row in rows:
        lines.begin_row()
        where = f"{file.name}:{lines.number}"
        if not row:
            continue
        if len(row) <= column:
            yield Bad(WRONG_FIELD, where)
        elif any(row[len(header) :]):
            yield Bad(WRONG_FIELD, f"{where} ({len(row)} columns, {len(header)} in the first line)")
        elif taking.plain:
            yield checked(row[column], where)
        else:
            yield taking.from_record(dict(zip(header, row, strict=False)), where)
