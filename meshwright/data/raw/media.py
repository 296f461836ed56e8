"""Records with pictures, film and sound: where each item is, and the text with a mark in the place of each."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.data.raw.bad import BROKEN_JSON, EMPTY, NOT_UTF8, WRONG_FIELD
from meshwright.data.raw.energon import EnergonSample
from meshwright.data.raw.items import BOM, Bad, Item, Medium, Taking, Text
from meshwright.data.raw.local import regular_inside
from meshwright.data.raw.remote import is_remote
from meshwright.errors import UserError
from meshwright.job.fields import MOST_FIELDS, MediaField

SUFFIXES = {
    "image": frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "image", "img"}),
    "audio": frozenset({"wav", "flac", "mp3", "ogg", "opus", "m4a", "aac", "audio"}),
    "video": frozenset({"mp4", "mkv", "webm", "mov", "avi", "m4v", "video"}),
}
TEXT_SUFFIXES = frozenset({"txt", "text", "md", "caption"})
NO_ITEMS = "placeholders without items"
LARGEST_ITEM_BYTES = 2 << 30
_FIRST_MARK = 0xFDD2
MARKS = "".join(chr(_FIRST_MARK + number) for number in range(MOST_FIELDS))
"""Code points that are no characters, one for each field, where an item is (rendering chats uses two more)."""
_MARK = re.compile(f"[{MARKS}]")
Record = dict[str, Any]


class Member(NamedTuple):
    """A file of a sample in a tar, or beside a text."""

    suffix: str
    medium: Medium


@dataclass(frozen=True)
class MediaTaking(Taking):
    """What is taken from records that hold more than text."""

    media: tuple[tuple[str, MediaField], ...] = ()
    cook: Callable[[Record], Record] | None = field(default=None, compare=False)
    """The user's own: makes a record of another shape one of ours."""
    recipe: str = ""
    """A hash of the user's own file."""
    check: str = "decode"
    energon: EnergonSample | None = None
    """What Energon's own description says of the samples."""
    source_file: str = field(default="", compare=False)
    """The file whose records are read; their paths are inside its folder."""

    @property
    def plain(self) -> bool:
        """Never: a text alone is not enough."""
        return False

    @property
    def whole(self) -> bool:
        """Items and their text stay together."""
        return True

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read where a table has them."""
        return tuple(column for name, own in self.media for column in _columns(name, own))

    def for_file(self, name: str) -> "MediaTaking":
        """The same, for the records of a file."""
        return replace(self, source_file=name)

    def shaping(self) -> dict[str, dict[str, Any]]:
        """What of the fields shapes the tokens, by name."""
        return {name: shaping_of(own) for name, own in self.media}

    def identity(self) -> list[Any]:
        """All that changes what is prepared."""
        places = [[own.column, own.folder, own.max_pixels] for _, own in self.media]
        energon = None if self.energon is None else [self.energon.kind, self.energon.sources]
        return [self.shaping(), places, self.check, energon, self.recipe]

    def placeholders(self) -> dict[str, str]:
        """`<image>` and its like, with the mark of each."""
        return {f"<{name}>": MARKS[number] for number, (name, _) in enumerate(self.media)}

    def from_record(self, record: Any, where: str, members: Sequence[Member] = ()) -> Item:
        """The document in a record, with its items."""
        if not isinstance(record, dict):
            return super().from_record(record, where)
        try:
            if self.cook is not None:
                record = _cooked(self.cook, record, where)
            elif self.energon is not None:
                record = self.energon.cook(record, self.text_field, self.chat is not None)
            media = list(self._media(record, where, members))
        except _Unusable as error:
            return Bad(error.kind, f"{where} ({error})")
        if self.key_field is not None and media:
            record = {self.text_field: "", **record}  # the other sources may have the text
        marked = {key: value if key in self.optional else self._marked(value) for key, value in record.items()}
        if any(_MARK.search(text) for text in _texts(record)):
            return Bad(NOT_UTF8, f"{where} (a code point that is no character)")
        named = [own for text in _texts(marked) for own in _MARK.findall(text)]
        missing = [one for one in media if MARKS[one.field] not in named]
        self._put_first(marked, "".join(MARKS[one.field] for one in missing))
        item = super().from_record(marked, where)
        if isinstance(item, Bad):
            return item
        return self._with_items(item, media, where)

    def from_members(
        self, members: Sequence[tuple[str, bytes]], media: Sequence[Member], where: str, key: str = ""
    ) -> Item:
        """The document of a sample whose texts are given by their endings, and its other files.

        Samples are joined by the key of their members unless they have the field.
        """
        record: Record = {}
        for suffix, raw in members:
            try:
                text = raw.removeprefix(BOM).decode("utf-8")
                value = json.loads(text) if suffix.rpartition(".")[2] == "json" else text
            except UnicodeDecodeError:
                return Bad(NOT_UTF8, f"{where}.{suffix}")
            except (ValueError, RecursionError):
                return Bad(BROKEN_JSON, f"{where}.{suffix}")
            if suffix == "json" and isinstance(value, dict):
                record = {**value, **record}
            else:
                record[suffix] = value
        if self.chat is None and not isinstance(record.get(self.text_field), str):
            found = next((record[name] for name in TEXT_SUFFIXES if isinstance(record.get(name), str)), None)
            if found is not None:
                record[self.text_field] = found
        if self.key_field is not None:
            record.setdefault(self.key_field, key)
        return self.from_record(record, where, media)

    def reads(self, suffix: str) -> bool:
        """Whether a member of a tar with this ending is part of the record; the user's own code is given all."""
        known = suffix.rpartition(".")[2] in ("json", *TEXT_SUFFIXES)
        return known or self.cook is not None or (self.energon is not None and suffix in self.energon.endings)

    def field_of(self, suffix: str) -> int | None:
        """The field that a member of a tar belongs to, by its ending."""
        last = suffix.rpartition(".")[2]
        for number, (_, own) in enumerate(self.media):
            if own.column in (suffix, last) or (own.column is None and last in SUFFIXES[own.kind]):
                return number
        return None

    def _media(self, record: Record, where: str, members: Sequence[Member]) -> Iterator[Medium]:
        yield from (member.medium for member in members)
        for number, (name, own) in enumerate(self.media):
            for column in _columns(name, own):
                values = record.get(column)
                for value in values if isinstance(values, list) else [values]:
                    if value is not None:
                        yield self._medium(number, name, own, value, where)

    def _medium(self, number: int, name: str, own: MediaField, value: Any, where: str) -> Medium:
        if isinstance(value, dict):  # as Hugging Face's datasets keep pictures and sound
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes):
            return Medium(number, f"{where} {name}", data=value, size=len(value))
        if not isinstance(value, str) or not value:
            raise _Unusable(WRONG_FIELD, f'a {type(value).__name__} in "{name}"')
        return Medium(number, _path(value, own, self.source_file, name), named=True)

    def _marked(self, value: Any) -> Any:
        """A value of a record with marks for placeholders, in texts and in the parts of messages."""
        if isinstance(value, str):
            for name, mark in self.placeholders().items():
                value = value.replace(name, mark)
            return value
        if isinstance(value, list):
            return [self._marked(part) for part in value]
        if isinstance(value, dict):
            kind = value.get("type")
            for number, (name, _) in enumerate(self.media):
                if kind in (name, f"{name}_url"):  # a part of a message, as chat templates of pictures take them
                    return {"type": "text", "text": MARKS[number]}
            return {key: self._marked(part) for key, part in value.items()}
        return value

    def _put_first(self, record: Record, marks: str) -> None:
        """Give items that the text does not name a place before it, in the first message that is not the system's."""
        if not marks:
            return
        if self.chat is None:
            if isinstance(record.get(self.text_field), str):
                record[self.text_field] = marks + record[self.text_field]
            return
        for key in ("prompt", "instruction"):
            if isinstance(record.get(key), str):
                record[key] = marks + record[key]
                return
        messages = next((record[key] for key in ("messages", "conversations", "prompt") if key in record), None)
        for message in messages if isinstance(messages, list) else ():
            content = "content" if isinstance(message, dict) and "content" in message else "value"
            if not isinstance(message, dict) or (message.get("role") or message.get("from")) == "system":
                continue
            if isinstance(message.get(content), str):
                message[content] = marks + message[content]
            elif isinstance(message.get(content), list):
                message[content] = [{"type": "text", "text": marks}, *message[content]]
            return

    def _with_items(self, item: Text, media: list[Medium], where: str) -> Item:
        """A marked text with its items in the order of their marks."""
        ordered: list[Medium] = []
        left = {number: [one for one in media if one.field == number] for number in range(len(self.media))}
        for mark in _MARK.findall(item.text):
            own = left[ord(mark) - _FIRST_MARK]
            if not own:
                name = self.media[ord(mark) - _FIRST_MARK][0]
                return Bad(NO_ITEMS, f"{where} (more <{name}> in the text than the record has)")
            ordered.append(own.pop(0))
        if rest := [self.media[number][0] for number, own in left.items() if own]:
            return Bad(NO_ITEMS, f"{where} (fewer <{rest[0]}> in the text than the record has)")
        if self.key_field is None and not unmarked(item.text).strip():
            return Bad(EMPTY, where)
        size_bytes = len(_MARK.sub("", item.text).encode("utf-8"))
        marks = item.marks if item.marks is not None else ((0, len(item.text) + 1),)
        return item._replace(media=tuple(ordered), marks=marks, size_bytes=size_bytes, where=where)


def media_beside(taking: MediaTaking, path: Path) -> list[Member]:
    """The files next to a text that have its name and the ending of a field."""
    found = []
    for beside in sorted(path.parent.glob(f"{_literal(path.stem)}.*")):
        suffix = beside.name[len(path.stem) + 1 :].lower()
        number = taking.field_of(suffix) if beside != path else None
        if number is not None:
            regular_inside([beside], path.parent)
            found.append(Member(suffix, Medium(number, str(beside), named=True)))
    return found


def is_medium(name: str) -> bool:
    """Whether a file's name says that it is a picture, a film or a sound."""
    return any(name.lower().rpartition(".")[2] in suffixes for suffixes in SUFFIXES.values())


def text_parts(text: str) -> list[tuple[str, int]]:
    """A marked text between its marks, each part with the place where it begins."""
    parts, begin = [], 0
    for mark in _MARK.finditer(text):
        parts.append((text[begin : mark.start()], begin))
        begin = mark.end()
    return [*parts, (text[begin:], begin)]


def with_placeholders(text: str, taking: MediaTaking) -> str:
    """A marked text as it can be read again; marks before everything else need no placeholder."""
    rest = text.lstrip(MARKS)
    if not _MARK.search(rest):
        return rest
    for name, mark in taking.placeholders().items():
        text = text.replace(mark, name)
    return text


def unmarked(text: str) -> str:
    """A text without marks, for a tokenizer to learn from."""
    return _MARK.sub("", text)


def shaping_of(own: MediaField) -> dict[str, Any]:
    """What of a field's settings shapes the tokens."""
    names = {"video": ["frames"], "audio": ["rate", "seconds", "windows"]}.get(own.kind, [])
    return own.model_dump(mode="json", include={"kind", "tokens", "placeholder", *names})


class _Unusable(Exception):
    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def _cooked(cook: Callable[[Record], Record], record: Record, where: str) -> Record:
    try:
        found = cook(record)
    except Exception as error:
        raise UserError(f"data.encoder: cook fails at {where} ({type(error).__name__}: {error}); fix it") from error
    if not isinstance(found, dict):
        raise UserError(f"data.encoder: cook returns a {type(found).__name__} at {where}; return a dictionary")
    return found


def _path(value: str, own: MediaField, source_file: str, name: str) -> str:
    """A path of a record, which may not lead out of its folder: records do not choose what is read."""
    if "\0" in value or not _is_unicode(value):
        raise _Unusable(WRONG_FIELD, f'{value[:80]!r} in "{name}" cannot be the name of a file')
    if is_remote(source_file) and own.folder is None:
        return f"{source_file.rpartition('/')[0]}/{_inside(value)}"
    if own.folder is not None and is_remote(own.folder):
        return f"{own.folder.rstrip('/')}/{_inside(value)}"
    folder = (Path(source_file).parent if own.folder is None else Path(own.folder).expanduser()).resolve()
    try:
        path = (folder / value).resolve()
    except (OSError, RuntimeError):  # Python 3.13 leaves it to whoever opens the file
        raise _Unusable(WRONG_FIELD, f'{value[:80]!r} in "{name}" is a loop of links') from None
    if not path.is_relative_to(folder):
        raise _Unusable(WRONG_FIELD, f'"{name}" leads out of {folder}; set data.fields.{name}.folder')
    return str(path)


def _is_unicode(value: str) -> bool:
    """Whether a text has no half of a surrogate pair, which no file system and no record of ours can hold."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _inside(value: str) -> str:
    if is_remote(value) or value.startswith("/") or ".." in value.split("/"):
        raise _Unusable(WRONG_FIELD, f"{value!r} leads out of its folder")
    return value


def _columns(name: str, own: MediaField) -> tuple[str, ...]:
    return (own.column,) if own.column is not None else (name, f"{name}s")


def _literal(stem: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", stem)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        yield from (text for part in value for text in _texts(part))
    elif isinstance(value, dict):
        yield from (text for part in value.values() for text in _texts(part))
