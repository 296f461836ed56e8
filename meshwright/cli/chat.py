"""`meshwright chat`: a conversation with a fine-tuned run or a Hugging Face folder."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli.amounts import token_option
from meshwright.cli.generate import AUDIO, DEVICE, IMAGE, SEED, TEMPERATURE, TOP_P, VIDEO
from meshwright.cli.job import JSON
from meshwright.errors import UserError, print_error

if TYPE_CHECKING:
    from meshwright.runs.chat import Chat

TOKENS = token_option(512, "--tokens", "Maximum number of tokens of an answer.")


def chat(
    source: Path = typer.Argument(help="A run folder or a Hugging Face folder.", metavar="RUN|FOLDER"),
    once: str | None = typer.Option(None, "--once", help="Answer this one question and end."),
    system: str | None = typer.Option(None, "--system", help="A system message before the first question."),
    image: list[Path] = IMAGE,
    video: list[Path] = VIDEO,
    audio: list[Path] = AUDIO,
    tokens: int = TOKENS,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = SEED,
    device: str = DEVICE,
    as_json: bool = JSON,
) -> None:
    """Talk to a model that has a chat template; a question per line. Ctrl-C stops an answer, Ctrl-D ends the chat.

    Pictures, films and sounds belong to the first question.
    """
    if as_json and once is None:
        raise UserError("--json prints one answer; give the question with --once")
    if once is not None and not once.strip():
        raise UserError(f'--once = "{once}" holds no question; write one, or leave it out for a conversation')
    from meshwright.cli.output import print_json
    from meshwright.data import Shown
    from meshwright.runs.chat import open_chat

    shown = Shown(image, video, audio)
    opened = open_chat(source, device, system, shown, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    if once is None:
        _talk(opened, source)
    elif as_json:
        answer = opened.ask(once)
        messages = [message._asdict() for message in opened.messages]
        ending = {"answer": answer, "tokens": opened.written, "stopped": opened.stopped}
        print_json({"source": str(source), "step": opened.step, "messages": messages, **ending})
    else:
        _answer(opened, once)


def _talk(chat: "Chat", source: Path) -> None:
    """Questions from a person at a terminal, or from a file, until they end."""
    terminal = sys.stdin.isatty()
    if terminal:
        weights = "" if chat.step is None else f", step {chat.step}"
        print(f"{source}{weights}. Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    for question in _questions(terminal):
        try:
            _answer(chat, question)
        except KeyboardInterrupt:
            if not terminal:
                raise
            print()
        except UserError as error:  # of this question: another may be asked
            if not terminal:
                raise
            print_error(error)


def _questions(terminal: bool) -> Iterator[str]:
    if terminal:
        import readline  # noqa: F401  (lines can be edited, and earlier ones come back)
    while True:
        try:
            question = input("> " if terminal else "")
            question.encode("utf-8")  # a locale may let bytes through that are no text
        except UnicodeError:
            raise UserError("a question is not UTF-8 text; save it as UTF-8") from None
        except (EOFError, KeyboardInterrupt) as end:
            if terminal:
                print()
            elif isinstance(end, KeyboardInterrupt):
                raise
            return
        if question.strip():
            yield question


def _answer(chat: "Chat", question: str) -> None:
    from meshwright.cli.output import print_written

    with closing(chat.stream(question)) as parts:
        for part in parts:
            print_written(part, end="")
    print()
