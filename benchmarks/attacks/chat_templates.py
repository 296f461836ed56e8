"""Chat templates from a grammar of hostile constructs, and conversations of odd code points."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attacks.case import Case, Family
from attacks.damage import ODD

EXPRESSIONS = [
    "messages",
    "messages[0].content",
    "messages | length",
    "'a' * 10 ** 10",
    "range(99999)",
    "1 / 0",
    "nothing",
]
EXPRESSIONS += ["'%1000000000d' % 1", "messages | tojson(indent=10 ** 9)", "''.__class__", "messages.append(1)", "{}"]
EXPRESSIONS += [
    "('x' * 10 ** 7).replace('x', 'y' * 1000)",
    "9 ** (9 ** 7)",
    "messages[-1:0:-1]",
    "'\\ufdd0'",
    "'\\ud800'",
]
EXPRESSIONS += ["'{:>1000000000}'.format(1)", "'x' | center(10 ** 9)", "'x' | indent(10 ** 9)", "raise_exception('no')"]
EXPRESSIONS += [
    "messages | map(attribute='role') | join(',')",
    "m(m)",
    "self",
    "loop.index",
    "lipsum(n=100000)",
    "cycler()",
]
EXPRESSIONS += [
    "[1] * 10 ** 9",
    "messages | batch(10 ** 9, 1) | list",
    "''.join(range(5))",
    "bos_token",
    "'a' + 1",
    "1 + 'a'",
]
WRAPS = ["{{% for a in range(99999) %}}{}{{% endfor %}}", "{{% if messages %}}{}{{% endif %}}", "{{% set x = 1 %}}{}"]
WRAPS += [
    "{{% macro m(x) %}}{}{{{{ m(x) }}}}{{% endmacro %}}{{{{ m(1) }}}}",
    "{{% generation %}}{}{{% endgeneration %}}",
]
WRAPS += [
    "{{% for message in messages %}}{}{{% endfor %}}",
    "{{% raw %}}{}{{% endraw %}}",
    "{{% filter upper %}}{}{{% endfilter %}}",
]
WRAPS += [
    "{{% call(x) m() %}}{}{{% endcall %}}",
    "{{% for a in messages recursive %}}{}{{{{ loop(messages) }}}}{{% endfor %}}",
]
BROKEN = [
    "{% for %}",
    "{{",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends x %}",
    "\0",
    "{% break %}",
]
WORDS = ["hi", "", "\ud800", "\ufdd0", "<|endoftext|>", "\0", "x" * 100_000, "\u202e", "{{ 1 / 0 }}", "<think>"]


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of templates."""
    for number in range(1 << 62):
        yield Case(f"{number}", partial(_run, _template(chance), [chance.choice(WORDS) for _ in range(4)]))


def _template(chance: random.Random) -> str:
    text = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}" * chance.randrange(2)
    for _ in range(chance.randint(1, 3)):
        text += "{{ " + chance.choice(EXPRESSIONS) + " }}" if chance.random() < 0.9 else chance.choice(BROKEN)
    for _ in range(chance.randrange(3)):
        text = chance.choice(WRAPS).format(text)
    return text


def _run(template: str, words: list[str], folder: Path) -> None:
    from meshwright.data import chat
    from meshwright.data.chat import ChatTemplate
    from meshwright.data.raw import Taking

    chat.SECONDS = 1.0  # type: ignore[misc]
    taking = Taking(chat=ChatTemplate(template, {"bos_token": "<s>"}, ["<|endoftext|>"], "template.jinja"))
    roles = ["user", "assistant"] * 2
    turns = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    for record in ({"messages": turns}, {"messages": turns[:2]}, {"prompt": words[0], "completion": words[1]}, *ODD):
        taking.from_record(record, "talk.jsonl:1")


CHAT_TEMPLATES = Family("chat templates", draw, weight=0.5)
