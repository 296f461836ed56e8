"""Conversations and pairs of answers out of the common JSON shapes: lists of messages, each with a role and a text."""

from typing import Any, NamedTuple

ROLES = ("system", "user", "assistant", "tool")
SHAPES = '"messages", "conversations" (from, value), "prompt" and "completion", or "instruction" and "output"'
FIELDS = ("messages", "conversations", "prompt", "completion", "system", "instruction", "input", "output")
"""All that the shapes of conversations use."""
PAIR_FIELDS = ("prompt", "system", "chosen", "rejected")
"""All that pairs use."""
_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}


class Message(NamedTuple):
    """What one side says."""

    role: str
    content: str


class Conversation(NamedTuple):
    """A conversation; plain ones are a prompt and its completion without roles."""

    messages: tuple[Message, ...]
    plain: bool = False
    shape: str = "messages"
    """The name of the format it was written in."""


class Pair(NamedTuple):
    """Two answers to one prompt, each with the prompt before it."""

    chosen: Conversation
    rejected: Conversation


class BadConversation(Exception):
    """What is wrong with a record, as the end of a sentence."""


def conversation_of(record: Any) -> Conversation:
    """The conversation in a record of any of the known shapes."""
    if not isinstance(record, dict):
        raise BadConversation(f"is a {_kind(record)} and not an object")
    plain, shape = False, "messages"
    if "messages" in record:
        messages = _messages(record["messages"], "messages", "role", "content")
    elif "conversations" in record:
        shape = "ShareGPT"
        messages = _messages(record["conversations"], "conversations", "from", "value")
    elif "prompt" in record and "completion" in record:
        plain, shape = isinstance(record["prompt"], str), "prompt and completion"
        messages = _side(record["prompt"], "prompt", "user") + _side(record["completion"], "completion", "assistant")
    elif "instruction" in record and "output" in record:
        shape = "Alpaca"
        asked = _text(record["instruction"], "instruction")
        given = _text(record.get("input") or "", "input")
        system = [Message("system", _text(record["system"], "system"))] if record.get("system") else []
        question = f"{asked}\n\n{given}" if given.strip() else asked
        messages = [*system, Message("user", question), Message("assistant", _text(record["output"], "output"))]
    else:
        answers = {"chosen", "rejected"} <= record.keys()
        remedy = '; data.format = "preferences" (--format preferences) reads pairs' if answers else ""
        raise BadConversation(f"has none of {SHAPES} ({_only(record)}){remedy}")
    if not any(message.role == "assistant" and message.content.strip() for message in messages):
        raise BadConversation("has no word of the assistant's, so there is nothing to learn from it")
    return Conversation(tuple(messages), plain, shape)


def pair_of(record: Any) -> Pair:
    """The two answers in a record with "chosen" and "rejected": texts or lists of messages, the prompt apart or in
    both."""
    if not isinstance(record, dict):
        raise BadConversation(f"is a {_kind(record)} and not an object")
    answers = [record.get(side) for side in ("chosen", "rejected")]
    if {"completion", "label"} <= record.keys():
        raise BadConversation(
            'has one labelled answer ("completion", "label"), where two answers to one prompt are compared; give '
            '"chosen" and "rejected"'
        )
    if any(answer is None for answer in answers):
        raise BadConversation(f'has no "chosen" and "rejected" ({_only(record)})')
    plain = all(isinstance(answer, str) for answer in answers)
    if not plain and not all(isinstance(answer, list) for answer in answers):
        raise BadConversation('has a text in one of "chosen" and "rejected" and messages in the other')
    prompt = record.get("prompt")
    if plain and prompt is None:
        raise BadConversation('has texts in "chosen" and "rejected" but no "prompt" before them')
    asked = [] if prompt is None else _side(prompt, "prompt", "user")
    if record.get("system"):
        asked = [Message("system", _text(record["system"], "system")), *asked]
    shape = f"pairs of {'texts' if plain else 'messages'}"
    chosen, rejected = (
        Conversation(_after(asked, _side(answer, side, "assistant")), plain and isinstance(prompt, str), shape)
        for answer, side in zip(answers, ("chosen", "rejected"), strict=True)
    )
    if chosen.messages == rejected.messages:
        raise BadConversation('has the same in "chosen" and "rejected", so there is nothing to prefer')
    apart = next((both for both in zip(chosen.messages, rejected.messages, strict=False) if both[0] != both[1]), None)
    if apart is not None and any(message.role != "assistant" for message in apart):
        raise BadConversation('has answers to different prompts in "chosen" and "rejected"')
    for side, conversation in (("chosen", chosen), ("rejected", rejected)):
        last = conversation.messages[-1]
        if last.role != "assistant" or not last.content.strip():
            raise BadConversation(f'does not end with words of the assistant\'s in "{side}"')
    return Pair(chosen, rejected)


def _after(prompt: list[Message], answer: list[Message]) -> tuple[Message, ...]:
    """An answer behind its prompt, which lists of messages often repeat."""
    users = [message for message in prompt if message.role != "system"]
    repeats = bool(users) and any(answer[first : first + len(users)] == users for first in (0, 1))
    return tuple(answer if repeats else [*prompt, *answer])


def _side(value: Any, field: str, role: str) -> list[Message]:
    return [Message(role, value)] if isinstance(value, str) else _messages(value, field, "role", "content")


def _only(record: dict[str, Any]) -> str:
    return f"only {', '.join(list(record)[:5]) or 'no fields at all'}"


def _messages(value: Any, field: str, role_key: str, content_key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadConversation(f'has no list of messages in its field "{field}"')
    messages = []
    for number, entry in enumerate(value):
        where = f"{field}[{number}]"
        if not isinstance(entry, dict) or role_key not in entry or content_key not in entry:
            raise BadConversation(f'has no "{role_key}" and "{content_key}" in {where}')
        role = _NAMES.get(entry[role_key], entry[role_key]) if isinstance(entry[role_key], str) else None
        if role not in ROLES:
            raise BadConversation(f"has the role {entry[role_key]!r} in {where}; known are {', '.join(ROLES)}")
        messages.append(Message(role, _text(entry[content_key], where)))
    return messages


def _text(value: Any, where: str) -> str:
    """A text, or parts of one."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    raise BadConversation(f"has a {_kind(value)} in {where} where text is needed")


def _kind(value: Any) -> str:
    return {type(None): "null", dict: "JSON object", list: "list"}.get(type(value), type(value).__name__)
