"""Chat templates: a conversation as the text a tokenizer's own template makes of it, and where the assistant speaks."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.data.conversations import BadConversation, Conversation, Message
from meshwright.data.tokenizer import Spans
from meshwright.errors import UserError

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Code points that are no characters and never will be: marks in what a template writes."""
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """Renders conversations; without a template's text only prompts with their completions."""

    def __init__(self, source: str | None, special: dict[str, str], reserved: Sequence[str], origin: str) -> None:
        """Special tokens have names that templates use; no text of a message may hold a reserved one."""
        self._source, self._special, self._reserved, self._origin = source, special, reserved, origin

    @property
    def fingerprint(self) -> str:
        """A hash by which equal templates are recognised."""
        return hashlib.sha256(json.dumps([self._source, self._special]).encode()).hexdigest()

    def render(self, conversation: Conversation) -> tuple[str, Spans]:
        """The conversation as text, and the parts of it that the assistant writes, the end of its turns included."""
        messages = conversation.messages
        for message in messages:
            for token in (*self._reserved, _OPEN, _CLOSE):
                if token in message.content:
                    raise BadConversation(f"holds the special token {token} amid a text")
        if self._source is None:
            if not conversation.plain:
                raise UserError(
                    f"data.tokenizer: {self._origin} brings no chat template (looked for {TEMPLATE} and in {CONFIG} "
                    "beside it); name a file with one in data.chat_template, or with --chat-template"
                )
            prompt = "".join(message.content for message in messages[:-1])
            text = prompt + messages[-1].content
            return text, ((len(prompt), len(text) + 1),)  # the end of text behind it is to be learned too
        marked = self._apply(messages)
        text, spans = _without_marks(marked)
        return text, spans or self._by_prompts(text, messages)

    def _by_prompts(self, text: str, messages: Sequence[Message]) -> Spans:
        """Where the template marks nothing: a message of the assistant's is what follows the prompt for it."""
        spans = []
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before, after = self._apply(messages[:number], prompts=True), self._apply(messages[: number + 1])
            if not (after.startswith(before) and text.startswith(after)):
                raise BadConversation(
                    f"is written by the chat template of {self._origin} in a way that does not tell where message "
                    f"{number} begins: what comes later changes what came before"
                )
            spans.append((len(before), len(after)))
        return spans

    def _apply(self, messages: Sequence[Message], prompts: bool = False) -> str:
        from jinja2 import TemplateError

        told = [message._asdict() for message in messages]
        try:
            return self._template(messages=told, add_generation_prompt=prompts, **self._special)
        except TemplateError as error:
            raise BadConversation(f"is refused by the chat template of {self._origin} ({error})") from error

    @cached_property
    def _template(self) -> Callable[..., str]:
        from jinja2 import TemplateError
        from jinja2.exceptions import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(reason: str) -> None:
            raise TemplateError(reason)

        # As templates are written for: blocks leave no white space behind.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        environment.add_extension("jinja2.ext.loopcontrols")
        environment.add_extension(_generation_tag())
        try:
            assert self._source is not None
            return environment.from_string(self._source).render
        except TemplateSyntaxError as error:
            raise UserError(f"{self._origin}: the chat template is broken ({error}); mend it") from error


def load_chat_template(tokenizer: Path | None, given: str | None, named: str = "data.chat_template =") -> ChatTemplate:
    """The template in a given file, which errors name so, else the one beside a tokenizer.json."""
    config = _json(tokenizer.parent / CONFIG) if tokenizer is not None else {}
    special = {name: _token(token) for name, token in config.items() if name in _NAMED and token}
    added = _json(tokenizer).get("added_tokens", []) if tokenizer is not None else []
    reserved = [token["content"] for token in added if token.get("special")]
    source, origin = _find(tokenizer, given, config, named)
    return ChatTemplate(source, special, reserved, origin)


def _find(tokenizer: Path | None, given: str | None, config: dict[str, Any], named: str) -> tuple[str | None, str]:
    """The text of the template, if there is one, and where it is from."""
    if given is not None:
        path = Path(given).expanduser()
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{named} {given} cannot be read ({error}); correct the path") from error
    if tokenizer is None:
        return None, "a tokenizer trained here"
    beside = tokenizer.parent / TEMPLATE
    if beside.is_file():
        return beside.read_text(encoding="utf-8"), str(beside)
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get("default")
    return found if isinstance(found, str) else None, str(tokenizer)


def _json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer: {path} cannot be read ({error}); mend or remove it") from error
    return config if isinstance(config, dict) else {}


def _token(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _without_marks(marked: str) -> tuple[str, Spans]:
    """The text without the marks of a template, and the parts that were marked."""
    parts, spans, length = re.split(f"([{_OPEN}{_CLOSE}])", marked), [], 0
    text = []
    for part in parts:
        if part == _OPEN:
            spans.append((length, length))
        elif part == _CLOSE:
            spans[-1] = (spans[-1][0], length)
        else:
            text.append(part)
            length += len(part)
    return "".join(text), spans


def _generation_tag() -> Any:
    """Some templates tell with a tag what the assistant writes."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body, lineno=line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return _OPEN + caller() + _CLOSE

    return Generation
