"""What reading the input gives, good and bad, and how a record becomes a document: its text, conversation or key."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.data.chat import ChatTemplate, Overran
from meshwright.data.conversations import FIELDS, BadConversation, conversation_of
from meshwright.data.raw.bad import BROKEN_JSON, EMPTY, NO_CONVERSATION, NO_KEY, NOT_UTF8, WRONG_FIELD
from meshwright.data.tokenizer import Spans
from meshwright.errors import UserError

BOM = b"\xef\xbb\xbf"


class Text(NamedTuple):
    """A document, or a piece of a long one."""

    text: str
    size_bytes: int
    """Of the text as UTF-8."""
    begins: bool = True
    ends: bool = True
    file: int | None = None
    """The number of the file that is this one document, which may go on in another unit."""
    marks: Spans | None = None
    """The parts that the loss counts; None where it counts all."""
    key: str | None = None
    """What other sources' documents are joined to this one by."""


class Bad(NamedTuple):
    """A document that cannot be used: what is wrong with it, and where it is."""

    kind: str
    place: str


Item = Text | Bad


@dataclass(frozen=True)
class Taking:
    """What is taken from every record of the input: a text, perhaps with a key, or a conversation."""

    text_field: str = "text"
    key_field: str | None = None
    chat: ChatTemplate | None = None

    @property
    def plain(self) -> bool:
        """Whether a text alone is enough."""
        return self.key_field is None and self.chat is None

    @property
    def fields(self) -> tuple[str, ...]:
        """Those of a record that may be needed."""
        if self.chat is not None:
            return FIELDS
        return (self.text_field,) if self.key_field is None else (self.text_field, self.key_field)

    def from_json(self, raw: bytes, where: str) -> Item:
        """The document in a line or member of JSON."""
        try:
            record = json.loads(raw.removeprefix(BOM).decode("utf-8"))
        except UnicodeDecodeError:
            return Bad(NOT_UTF8, where)
        except (ValueError, RecursionError):
            return Bad(BROKEN_JSON, where)
        return self.from_record(record, where)

    def from_record(self, record: Any, where: str) -> Item:
        """The document in a record."""
        if self.chat is not None:
            try:
                written, marks = self.chat.render(conversation_of(record))
            except Overran as error:
                raise UserError(f"{where} {error}") from error
            except BadConversation as error:
                return Bad(NO_CONVERSATION, f"{where} ({error})")
            item = checked(written, where)
            return item._replace(marks=marks) if isinstance(item, Text) else item
        if not isinstance(record, dict) or not isinstance(text := record.get(self.text_field), str):
            return Bad(WRONG_FIELD, f"{where} ({self._lack(record)})")
        item = checked(text, where)
        if self.key_field is None or isinstance(item, Bad):
            return item
        key = record.get(self.key_field)
        if isinstance(key, bool) or not isinstance(key, str | int):
            return Bad(NO_KEY, where)
        return item._replace(key=str(key))

    def _lack(self, record: Any) -> str:
        """Why a record gives no text."""
        if not isinstance(record, dict):
            return f"a {type(record).__name__} and no object"
        if self.text_field in record:
            return f'a {type(record[self.text_field]).__name__} in "{self.text_field}"'
        lack = f'no "{self.text_field}", only {", ".join(repr(name)[:40] for name in list(record)[:5]) or "nothing"}'
        if {"messages", "conversations"} & record.keys():
            return f'{lack}; data.format = "conversations" (--format conversations) reads those'
        return lack


def checked(text: str, where: str) -> Item:
    """A text that holds something, and nothing but characters."""
    if not text.strip():
        return Bad(EMPTY, where)
    try:
        return Text(text, len(text.encode("utf-8")))
    except UnicodeEncodeError:  # half of a surrogate pair, or bytes that were no UTF-8
        return Bad(NOT_UTF8, where)


def from_bytes(raw: bytes, where: str) -> Item:
    """The text in bytes, a mark of their order at the front left out."""
    try:
        return checked(raw.removeprefix(BOM).decode("utf-8"), where)
    except UnicodeDecodeError:
        return Bad(NOT_UTF8, where)
