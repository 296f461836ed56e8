"""The process that renders chat templates: run by its path, since a template is a program of whoever wrote it.

It imports nothing of this product, holds nothing of the one that started it, bounds its own memory and processor time,
and answers one line of JSON for each that it is asked: `chat.py` is the other side.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Code points that are no characters and never will be: marks in what a template writes."""

Spans = list[tuple[int, int]]
Template = Callable[..., str]


class Refused(Exception):
    """What is wrong with a conversation, as the end of a sentence."""


class Overran(Exception):
    """What a template does that it may not."""


class _Generation(Extension):
    """Some templates tell with a tag what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body, lineno=line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


def compiled(source: str) -> Template:
    """The template as a function of its names."""

    def refuse(reason: object) -> None:
        raise TemplateError(str(reason))

    # As templates are written for: blocks leave no white space behind. Nothing is computed while it is only read.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, optimized=False)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.add_extension("jinja2.ext.loopcontrols")
    environment.add_extension(_Generation)
    return environment.from_string(source).render


def rendered(
    template: Template, messages: list[dict[str, str]], special: dict[str, str], longest: int
) -> tuple[str, Spans]:
    """A conversation as text, and the parts of it that the assistant writes."""

    def apply(some: list[dict[str, str]], prompts: bool = False) -> str:
        return _bounded(template(messages=some, add_generation_prompt=prompts, **special), longest)

    text, spans = _without_marks(apply(messages))
    if spans:
        return text, spans
    # Where the template marks nothing, a message of the assistant's is what follows the prompt for it.
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = apply(messages[:number], prompts=True), apply(messages[: number + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise Refused(
                f"in a way that does not tell where message {number} begins: what comes later changes what came before"
            )
        spans.append((len(before), len(after)))
    return text, spans


def prompted(
    template: Template, messages: list[dict[str, str]], special: dict[str, str], longest: int, prompts: bool
) -> tuple[str, Spans]:
    """A conversation that is still going on as text, with the beginning of the assistant's answer if asked for.

    Some templates write today's date; training data gets none, so that the same files always give the same tokens.
    """
    given = {"tools": None, "documents": None, "strftime_now": _now, **special}  # as transformers gives them
    return _without_marks(_bounded(template(messages=messages, add_generation_prompt=prompts, **given), longest))[0], []


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _bounded(text: str, longest: int) -> str:
    if len(text) > longest:
        raise Overran(f"writes {len(text):,} characters of it, more than {longest:,}")
    return text


def _without_marks(marked: str) -> tuple[str, Spans]:
    """The text without the marks of a template, and the parts that were marked."""
    spans: Spans = []
    text, length, depth = [], 0, 0
    for part in re.split(f"([{OPEN}{CLOSE}])", marked):
        if part == OPEN:
            spans += [(length, length)] if depth == 0 else []
            depth += 1
        elif part == CLOSE:
            depth -= 1
            if depth == 0:
                spans[-1] = (spans[-1][0], length)
        else:
            text.append(part)
            length += len(part)
        if depth < 0:
            break
    if depth:
        raise Refused("with a code point that stands for where the assistant begins or ends to speak")
    return "".join(text), spans


def _answer(template: Template, asked: Any, special: dict[str, str], longest: int) -> dict[str, Any]:
    try:
        if "prompts" in asked:
            text, spans = prompted(template, asked["messages"], special, longest, asked["prompts"])
        else:
            text, spans = rendered(template, asked["messages"], special, longest)
    except Refused as error:
        return {"unclear": str(error)}
    except TemplateError as error:
        return {"refused": _sentence(error)}
    except Overran as error:
        return {"overran": str(error)}
    except MemoryError:
        return {"overran": "needs too much memory"}
    except RecursionError:
        return {"refused": "it calls itself without end"}
    except Exception as error:  # a template may do anything that a program may
        return {"refused": f"{type(error).__name__}: {_sentence(error)}"}
    return {"text": text, "spans": spans}


def _sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _bound_time(seconds: float) -> None:
    """A backstop for a process whose parent is gone; the parent itself counts by the clock."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + 2 * seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes our input
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(b"{}\n")  # started
    sys.stdout.buffer.flush()
    told = json.loads(sys.stdin.buffer.readline())
    resource.setrlimit(resource.RLIMIT_AS, (told["memory_bytes"], told["memory_bytes"]))
    _bound_time(told["seconds"])

    def say(answer: dict[str, Any]) -> None:
        sys.stdout.buffer.write(json.dumps(answer).encode("ascii") + b"\n")
        sys.stdout.buffer.flush()

    try:
        template = compiled(told["source"])
    except (TemplateSyntaxError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return say({"broken": _sentence(error)})
    except Exception as error:
        return say({"broken": f"{type(error).__name__}: {_sentence(error)}"})
    say({})
    while line := sys.stdin.buffer.readline():
        _bound_time(told["seconds"])
        try:
            asked = json.loads(line)
            answer = _answer(template, asked, told["special"], told["longest"])
            say(answer)
        except MemoryError:
            say({"overran": "needs too much memory"})


if __name__ == "__main__":
    main()
