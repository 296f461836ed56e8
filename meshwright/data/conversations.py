"""Conversations out of the common JSON shapes: a list of messages, each with a role and a text."""

from typing import Any, NamedTuple

ROLES = ("system", "user", "assistant", "tool")
SHAPES = '"messages", "conversations" (from, value), "prompt" and "completion", or "instruction" and "output"'
FIELDS = ("messages", "conversations", "prompt", "completion", "system", "instruction", "input", "output")
"""All that the shapes use."""
_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}


class Message(NamedTuple):
    """What one side says."""

    role: str
    content: str


class Conversation(NamedTuple):
    """A conversation; plain ones are a prompt and its completion without roles."""

    messages: tuple[Message, ...]
    plain: bool = False


class BadConversation(Exception):
    """What is wrong with a record, as the end of a sentence."""


def conversation_of(record: Any) -> Conversation:
    """The conversation in a record of any of the known shapes."""
    if not isinstance(record, dict):
        raise BadConversation(f"is a {_kind(record)} and not an object")
    plain = False
    if "messages" in record:
        messages = _messages(record["messages"], "messages", "role", "content")
    elif "conversations" in record:
        messages = _messages(record["conversations"], "conversations", "from", "value")
    elif "prompt" in record and "completion" in record:
        plain = isinstance(record["prompt"], str)
        messages = _side(record["prompt"], "prompt", "user") + _side(record["completion"], "completion", "assistant")
    elif "instruction" in record and "output" in record:
        asked = _text(record["instruction"], "instruction")
        given = _text(record.get("input") or "", "input")
        system = [Message("system", _text(record["system"], "system"))] if record.get("system") else []
        question = f"{asked}\n\n{given}" if given.strip() else asked
        messages = [*system, Message("user", question), Message("assistant", _text(record["output"], "output"))]
    else:
        raise BadConversation(f"has none of {SHAPES} (only {', '.join(list(record)[:5]) or 'no fields at all'})")
    if not any(message.role == "assistant" and message.content.strip() for message in messages):
        raise BadConversation("has no word of the assistant's, so there is nothing to learn from it")
    return Conversation(tuple(messages), plain)


def _side(value: Any, field: str, role: str) -> list[Message]:
    return [Message(role, value)] if isinstance(value, str) else _messages(value, field, "role", "content")


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
