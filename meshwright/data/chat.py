"""Chat templates: a conversation as the text a tokenizer's own template makes of it, and where the assistant speaks."""

import hashlib
import json
import os
import select
import subprocess
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.data.conversations import BadConversation, Conversation, Message
from meshwright.data.files import read_json, read_text
from meshwright.data.lines import LONGEST_RECORD_BYTES
from meshwright.data.tokenizer import Spans, Tokenizer, load_tokenizer
from meshwright.errors import UserError
from meshwright.python_process import python_command, python_variables

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
SECONDS = 10.0
"""A template takes a thousandth of one for a conversation; one that takes so long will take so long for each."""
MEMORY_BYTES = 1 << 30
_MARKS = ("\ufdd0", "\ufdd1")
"""What `render.py` marks the assistant's parts with."""
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_PROBE = "answer"


class Overran(Exception):
    """What a template does that it may not, as the end of a sentence: no conversation will fare better."""


class ChatTemplate:
    """Renders conversations; without a template's text only prompts with their completions."""

    def __init__(self, source: str | None, special: dict[str, str], reserved: Sequence[str], origin: str) -> None:
        """Special tokens have names that templates use; no text of a message may hold a reserved one."""
        self._source, self._special, self._origin = source, special, origin
        self._reserved = (*reserved, *_MARKS)
        self._renderer: _Renderer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_renderer": None}

    @property
    def fingerprint(self) -> str:
        """A hash of the template and of how the assistant's tokens are recognised: data prepared with another way, by
        the first character, is prepared again."""
        return hashlib.sha256(json.dumps([self._source, self._special, "any character"]).encode()).hexdigest()

    def render(self, conversation: Conversation) -> tuple[str, Spans]:
        """The conversation as text, and the parts of it that the assistant writes, the end of its turns included."""
        messages = conversation.messages
        for message in messages:
            self._require_unreserved(message.content)
        if self._source is None:
            if not conversation.plain:
                raise UserError(
                    f"data.tokenizer: {self._origin} brings no chat template (looked for {TEMPLATE} and in {CONFIG} "
                    "beside it); name a file with one in data.chat_template, or with --chat-template"
                )
            prompt = "".join(message.content for message in messages[:-1])
            text = prompt + messages[-1].content
            self._require_unreserved(text)
            return text, ((len(prompt), len(text) + 1),)  # the end of text behind it is to be learned too
        answer = self._asked({"messages": [message._asdict() for message in messages]})
        return answer["text"], [(first, last) for first, last in answer["spans"]]

    @property
    def is_there(self) -> bool:
        """Whether there is a template's text."""
        return self._source is not None

    def files(self) -> dict[str, str]:
        """What to write next to a tokenizer.json for `load_chat_template` to find this template there, by name."""
        return {} if self._source is None else {TEMPLATE: self._source, CONFIG: json.dumps(self._special) + "\n"}

    def prompt(self, messages: Sequence[Message]) -> str:
        """A conversation up to where the assistant is to answer, as text."""
        for message in messages:
            self._require_unreserved(message.content)
        return self._ongoing(messages, prompts=True)

    def end_of_turn(self) -> str:
        """What ends every answer of the assistant's, as text; empty where the template does not tell."""
        try:
            text = self._ongoing([Message("user", "question"), Message("assistant", _PROBE)], prompts=False)
        except (BadConversation, Overran):
            return ""
        return text.rpartition(_PROBE)[2] if _PROBE in text else ""

    def _ongoing(self, messages: Sequence[Message], *, prompts: bool) -> str:
        text: str = self._asked({"messages": [message._asdict() for message in messages], "prompts": prompts})["text"]
        return text

    def _require_unreserved(self, text: str) -> None:
        for token in self._reserved:
            if token in text:
                raise BadConversation(f"holds the special token {token} amid a text")

    def _asked(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._source is not None
        if self._renderer is None or self._renderer.owner != os.getpid():
            self._renderer = _Renderer(self._source, self._special, self._origin)
        try:
            answer = self._renderer.ask(what)
        except Overran as error:
            self._renderer = None
            raise Overran(f"cannot be written: the chat template of {self._origin} {error}; fix the template") from None
        if "refused" in answer:
            raise BadConversation(f"is refused by the chat template of {self._origin} ({answer['refused']})")
        if "unclear" in answer:
            raise BadConversation(f"is written by the chat template of {self._origin} {answer['unclear']}")
        return answer


class _Renderer:
    """A process of its own for one template, with bounds on time and memory; it ends when its input does."""

    def __init__(self, source: str, special: dict[str, str], origin: str) -> None:
        self.owner = os.getpid()
        """A fork may not use it: the answers would reach whoever reads first."""
        self._process = subprocess.Popen(
            # Not by its module, which would bring all of torch with it.
            python_command(str(Path(__file__).with_name("render.py"))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, **python_variables()},
        )
        self._end = weakref.finalize(self, _end, self._process, self.owner)
        told = {"memory_bytes": MEMORY_BYTES, "seconds": SECONDS, "longest": LONGEST_RECORD_BYTES, "special": special}
        try:
            self._read_line(time.monotonic() + _STARTING_S)
            answer = self.ask({**told, "source": source})
        except Overran as error:
            raise UserError(f"{origin}: the chat template cannot be read: it {error}; fix it") from error
        if "broken" in answer:
            raise UserError(f"{origin}: the chat template is broken ({answer['broken']}); fix it")

    def ask(self, what: Any) -> dict[str, Any]:
        """The answer to a message, or `Overran` when none comes in time."""
        until = time.monotonic() + SECONDS
        try:
            self._write(json.dumps(what).encode("ascii") + b"\n", until)
            line = self._read_line(until)
        except Overran:
            self._end()
            raise
        if not line.endswith(b"\n"):
            self._end()
            raise Overran("ends the process that renders it, for lack of memory or time")
        answer: dict[str, Any] = json.loads(line)
        if "overran" in answer:
            self._end()
            raise Overran(answer["overran"] + f" (at most {MEMORY_BYTES >> 20} MiB)" * ("memory" in answer["overran"]))
        return answer

    def _write(self, raw: bytes, until: float) -> None:
        assert self._process.stdin is not None
        descriptor, place = self._process.stdin.fileno(), 0
        os.set_blocking(descriptor, False)
        while place < len(raw):
            self._wait(descriptor, select.POLLOUT, until)
            try:
                place += os.write(descriptor, raw[place : place + _PIPE_BYTES])
            except BlockingIOError:
                continue
            except OSError:  # it is gone, as the answer will tell
                return

    def _read_line(self, until: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, parts, length = self._process.stdout.fileno(), [b""], 0
        while not parts[-1].endswith(b"\n") and length <= _LONGEST_ANSWER_BYTES:
            self._wait(descriptor, select.POLLIN, until)
            part = os.read(descriptor, _PIPE_BYTES)
            if not part:
                break
            parts.append(part)
            length += len(part)
        return b"".join(parts)

    def _wait(self, descriptor: int, event: int, until: float) -> None:
        waiting = select.poll()
        waiting.register(descriptor, event)
        if not waiting.poll(max(0.0, until - time.monotonic()) * 1000):
            raise Overran(f"does not end within {SECONDS:g} s")


_PIPE_BYTES = 1 << 16
_STARTING_S = 60.0
"""Of Python itself, on a busy machine."""
_LONGEST_ANSWER_BYTES = 16 * LONGEST_RECORD_BYTES
"""JSON takes up to twelve bytes for a character."""


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() != owner:
        return
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.kill()
    process.wait()


def load_chat_template(tokenizer: Path | None, given: str | None, named: str = "data.chat_template =") -> ChatTemplate:
    """The template in a given file, which errors name so, else the one beside a tokenizer.json of data.tokenizer."""
    config, reserved = dict[str, Any](), list[str]()
    if tokenizer is not None:
        config = _config(tokenizer.parent / CONFIG, "data.tokenizer: ")
        reserved = load_tokenizer(tokenizer).control_names
    if given is not None:
        path = Path(given).expanduser()
        return ChatTemplate(_text(path, f"{named} {given}"), _special(config), reserved, str(path))
    if tokenizer is None:
        return ChatTemplate(None, {}, [], "a tokenizer trained here")
    source, origin = _beside(tokenizer.parent, config, "data.tokenizer: ")
    return ChatTemplate(source, _special(config), reserved, origin)


def chat_template_in(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that a folder has for its tokenizer."""
    config = _config(folder / CONFIG)
    source, origin = _beside(folder, config)
    return ChatTemplate(source, _special(config), tokenizer.control_names, origin)


def _special(config: dict[str, Any]) -> dict[str, str]:
    return {name: _token(token) for name, token in config.items() if name in _NAMED and token}


def _beside(folder: Path, config: dict[str, Any], named: str = "") -> tuple[str | None, str]:
    """The text of the template in a folder, if there is one, and where it is from."""
    path = folder / TEMPLATE
    if path.exists():
        return _text(path, f"{named}{path}"), str(path)
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        default = (entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default")
        found = next(default, {}).get("template")
    return found if isinstance(found, str) else None, str(folder / CONFIG)


def _text(path: Path, named: str) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{named} cannot be read ({error}); correct the path, or fix the file") from error


def _config(path: Path, named: str = "") -> dict[str, Any]:
    try:
        config = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{named}{path} cannot be read ({error}); fix or remove it") from error
    return config if isinstance(config, dict) else {}


def _token(value: Any) -> str:
    return str(value.get("content", "") if isinstance(value, dict) else value)
