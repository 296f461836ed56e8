"""Chat templates are programs of others: whatever they do, they do in bounded time and memory and are told in words."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from counting import counted_calls
from waiting import wait_until

from meshwright.data import chat
from meshwright.data.chat import ChatTemplate, Overran, load_chat_template
from meshwright.data.conversations import BadConversation, Conversation, Message
from meshwright.data.raw import Taking
from meshwright.errors import UserError

TALK = Conversation((Message("user", "hello"), Message("assistant", "hi")))
LINE = json.dumps({"messages": [message._asdict() for message in TALK.messages]}).encode()


def template(source: str, reserved=()) -> ChatTemplate:
    return ChatTemplate(source, {}, reserved, "model/chat_template.jinja")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ messages[0].content * messages[1].content }}", "TypeError"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.nothing.at_all }}", "no attribute"),
        ("{{ messages | tojson(indent='x', bad=1) }}", "TypeError"),
        ("{{ '%d' % 'x' }}", "TypeError"),
        ("{{ raise_exception(3) }}", "3"),
    ],
)
def test_what_a_template_does_wrong_is_told_with_its_file(source: str, reason: str) -> None:
    with pytest.raises(BadConversation, match=rf"refused by the chat template of model/.*jinja .*({reason})"):
        template(source).render(TALK)


@pytest.mark.parametrize(
    ("source", "seconds", "what"),
    [
        (
            "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}",
            1,
            "does not end within 1 s",
        ),
        ("{{ 'a' * 10 ** 10 }}", 100, "memory"),
        ("{{ '%10000000000d' % 1 }}", 100, "memory|ends the process"),
        ("{{ ('a' * 10 ** 8).replace('a', 'a' * 1000) }}", 100, "memory"),
        ("{{ messages[1].role[0] * 10 ** 8 }}", 100, "writes 100,000,000 characters"),
        ("{{ (messages | length) ** (3 ** 25) }}", 1, "does not end within 1 s|memory"),
        ("{{ 'x' | center(10 ** 10) }}", 100, "memory"),
        ("{{ [1] * 10 ** 10 }}", 100, "memory"),
    ],
)
def test_a_template_is_bounded_in_time_and_memory(source: str, seconds: int, what: str, monkeypatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", float(seconds))
    with pytest.raises(UserError, match=rf"talk\.jsonl:7 cannot be written: .*jinja .*({what}).*; fix"):
        Taking(chat=template(source)).from_json(LINE, "talk.jsonl:7")


@pytest.mark.parametrize("source", ["{% for %}", "{{ '" + "(" * 5, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"])
def test_a_template_that_cannot_be_compiled_is_named(source: str) -> None:
    with pytest.raises(UserError, match=r"model/chat_template\.jinja: the chat template (is broken|cannot be read)"):
        template(source).render(TALK)


@pytest.mark.parametrize("source", ["a\ufdd0b", "a\ufdd1b", "{{ '\\ufdd1\\ufdd0' }}"])
def test_marks_that_a_template_writes_itself_are_refused(source: str) -> None:
    with pytest.raises(BadConversation, match="with a code point that stands for where the assistant begins"):
        template(source).render(TALK)


def test_a_mark_within_a_mark_is_one_part() -> None:
    text, spans = template("ab{% generation %}c{% generation %}d{% endgeneration %}e{% endgeneration %}f").render(TALK)
    assert (text, spans) == ("abcdef", [(2, 5)])


def test_one_process_renders_many_conversations() -> None:
    made = template("{% for m in messages %}<{{ m.role }}>{% generation %}!{% endgeneration %}{% endfor %}")
    made.render(TALK)
    process = made._renderer._process
    with counted_calls() as calls:
        for _ in range(100):
            made.render(TALK)
    assert made._renderer._process is process
    assert calls.count < 200 * 100, calls


def test_it_goes_on_after_a_fork_and_after_its_process_died(monkeypatch) -> None:
    made = template("{% generation %}{{ messages[1].content }}{% endgeneration %}")
    assert made.render(TALK)[0] == "hi"
    if (child := os.fork()) == 0:
        os._exit(0 if made.render(TALK)[0] == "hi" else 1)
    assert os.waitpid(child, 0)[1] == 0 and made.render(TALK)[0] == "hi"
    os.kill(made._renderer._process.pid, signal.SIGKILL)
    with pytest.raises(Overran, match="ends the process that renders it"):
        made.render(TALK)
    assert made.render(TALK)[0] == "hi"


def test_no_process_outlives_the_one_that_asked() -> None:
    reading, writing = os.pipe()
    if (asker := os.fork()) == 0:
        made = template("{% generation %}a{% endgeneration %}")
        made.render(TALK)
        os.write(writing, str(made._renderer._process.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(asker, 0)
    renderer = Path("/proc", os.read(reading, 20).decode(), "stat")
    with contextlib.suppress(OSError):
        wait_until(lambda: renderer.read_text().split()[2] == "Z", "the renderer has not ended")


def test_a_name_made_of_two_halves_is_found() -> None:
    plain = Conversation((Message("user", "a <|endof"), Message("assistant", "text|>")), plain=True)
    with pytest.raises(BadConversation, match=r"holds the special token <\|endoftext\|>"):
        ChatTemplate(None, {}, ("<|endoftext|>",), "x").render(plain)


@pytest.mark.parametrize(
    "config",
    ["[]", '{"bos_token": {}}', '{"bos_token": [1]}', '{"chat_template": [3, {"name": "default"}]}', "[" * 99999],
)
def test_odd_settings_beside_a_tokenizer_are_survived_or_named(tmp_path: Path, config: str) -> None:
    from meshwright.data.tokenizer import train_tokenizer

    train_tokenizer(["some words"], 300).save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(config)
    try:
        load_chat_template(tmp_path / "tokenizer.json", None)
    except UserError as error:
        assert "tokenizer_config.json" in str(error)


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    from meshwright.data.tokenizer import train_tokenizer

    train_tokenizer(["some words"], 300).save(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"chat_template\.jinja cannot be read"):
        load_chat_template(tmp_path / "tokenizer.json", None)
