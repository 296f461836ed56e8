"""What reading the input gives, good and bad, and how a record becomes a document: its text, conversation or key."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.data.chat import ChatTemplate, Overran
from meshwright.data.conversations import FIELDS, PAIR_FIELDS, BadConversation, conversation_of, pair_of
from meshwright.data.raw.bad import BROKEN_JSON, EMPTY, NO_CONVERSATION, NO_KEY, NO_PAIR, NOT_UTF8, WRONG_FIELD
from meshwright.data.tokenizer import Spans
from meshwright.errors import UserError

BOM = b"\xef\xbb\xbf"


class Medium(NamedTuple):
    """A picture, a film or a sound of a record: bytes of the file that is read, of another one, or bytes at hand."""

    field: int
    name: str
    """As errors name it; its path where it is a file of its own."""
    offset: int = 0
    size: int = 0
    data: bytes | None = None
    named: bool = False
    """Whether it is a file of its own."""
    items: int = 1
    """Items that it becomes: frames of a film, windows of sound."""
    file: int | None = None
    """The number of the input it is in, if that is not the text's."""
    located: bool = False
    """Whether that can be read from the offset on, later and again."""


class Text(NamedTuple):
    """A document, or a piece of a long one."""

    text: str
    size_bytes: int
    """Of the text as UTF-8."""
    begins: bool = True
    ends: bool = True
    file: int | None = None
    """The number of the file that is this one document, which may go on in another unit, or that holds this
    conversation or pair."""
    marks: Spans | None = None
    """The parts that the loss counts; None where it counts all."""
    key: str | None = None
    """What other sources' documents are joined to this one by."""
    rejected: "Text | None" = None
    """The other answer of a pair, of which this one is the chosen."""
    shape: str | None = None
    """The name of the format a conversation or pair was written in."""
    where: str = ""
    """The place of a conversation or pair, as errors name it."""
    media: tuple[Medium, ...] = ()
    """What stands in the places of the text's marks, in their order."""

    @property
    def held_bytes(self) -> int:
        """What it takes in memory, nearly."""
        return self.size_bytes + sum(len(medium.data or b"") for medium in self.media)


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
    pairs: bool = False
    """Whether a record holds two answers, one of them preferred, and not one conversation."""

    @property
    def plain(self) -> bool:
        """Whether a text alone is enough."""
        return self.key_field is None and self.chat is None

    @property
    def whole(self) -> bool:
        """Whether documents may not be parted, and the loss counts only some of their tokens."""
        return self.chat is not None

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read where a table has them."""
        return ()

    @property
    def documents_each(self) -> int:
        """Documents that a record becomes."""
        return 2 if self.pairs else 1

    @property
    def fields(self) -> tuple[str, ...]:
        """Those of a record that may be needed."""
        if self.chat is not None:
            return PAIR_FIELDS if self.pairs else FIELDS
        return (self.text_field,) if self.key_field is None else (self.text_field, self.key_field)

    def for_file(self, name: str) -> "Taking":
        """The same, for the records of a file."""
        return self

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
                return self._pair(self.chat, record, where) if self.pairs else self._talk(self.chat, record, where)
            except Overran as error:
                raise UserError(f"{where} {error}") from error
            except BadConversation as error:
                return Bad(NO_PAIR if self.pairs else NO_CONVERSATION, f"{where} ({error})")
        if not isinstance(record, dict) or not isinstance(text := record.get(self.text_field), str):
            return Bad(WRONG_FIELD, f"{where} ({self._lack(record)})")
        item = checked(text, where)
        if self.key_field is None or isinstance(item, Bad):
            return item
        key = record.get(self.key_field)
        if isinstance(key, bool) or not isinstance(key, str | int):
            return Bad(NO_KEY, where)
        return item._replace(key=str(key))

    def _talk(self, chat: ChatTemplate, record: Any, where: str) -> Item:
        conversation = conversation_of(record)
        written, marks = chat.render(conversation)
        item = checked(written, where)
        if isinstance(item, Bad):
            return item
        return item._replace(marks=marks, shape=conversation.shape, where=where)

    def _pair(self, chat: ChatTemplate, record: Any, where: str) -> Item:
        """Both answers; what they have in common counts in neither."""
        pair = pair_of(record)
        texts, spans = zip(*(chat.render(side) for side in pair), strict=True)
        same = 0
        for chosen, rejected in zip(*spans, strict=False):
            if chosen != rejected or texts[0][: chosen[1]] != texts[1][: chosen[1]]:
                break
            same += 1
        if same in (len(spans[0]), len(spans[1])):
            raise BadConversation('has the same answer in "chosen" and "rejected" as the chat template writes them')
        items = [checked(text, where) for text in texts]
        chosen, rejected = (
            item._replace(marks=marks[same:], shape=pair.chosen.shape, where=where) if isinstance(item, Text) else item
            for item, marks in zip(items, spans, strict=True)
        )
        if isinstance(chosen, Bad) or isinstance(rejected, Bad):
            return chosen if isinstance(chosen, Bad) else rejected
        return chosen._replace(rejected=rejected)

    def _lack(self, record: Any) -> str:
        """Why a record gives no text."""
        if not isinstance(record, dict):
            return f"a {type(record).__name__} and no object"
        if self.text_field in record:
            return f'a {type(record[self.text_field]).__name__} in "{self.text_field}"'
        lack = f'no "{self.text_field}", only {", ".join(repr(name)[:40] for name in list(record)[:5]) or "nothing"}'
        if {"messages", "conversations"} & record.keys():
            return f'{lack}; data.format = "conversations" (--format conversations) reads those'
        if {"chosen", "rejected"} <= record.keys():
            return f'{lack}; data.format = "preferences" (--format preferences) reads pairs'
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
