"""Garbage command lines: every command and option, with valid words and nonsense in any order."""

import inspect
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from attacks.case import Case, Family, Refused, command
from attacks.damage import TEXTS

WORDS = [
    "demo",
    "-1",
    "0",
    "1",
    "7",
    "1e999",
    "nan",
    "inf",
    "99999999999999999999",
    "1" * 400,
    "/dev/null",
    "..",
    "8xh100",
]
WORDS += [
    "[",
    "{}",
    "=",
    "=1",
    "a.b.c=1",
    "model=1",
    "run.folder=",
    "model.width=-1",
    "model.width==1",
    "layout.tp=10**9",
]
WORDS += [
    "optimizer.lr=inf",
    "batch.global_batch=1e3",
    "data.sources=[1]",
    "model.name='\\u0000'",
    'run.folder="a\\nb"',
]
WORDS += [
    "--",
    "-",
    "--nothing",
    "--set",
    "--json",
    "-x",
    "nothing.toml",
    "x.json",
    "tp",
    "1,2",
    "99999x99999xh100",
    "fp8",
]
NUMBERS = ["0", "1", "2", "3", "8", "64", "-1", "1000000", "9" * 30, "1.5", "nan", "inf", "-inf", "1e308", "x", ""]
# These would run for minutes, or forever, if all arguments were valid: one always is not.
GUARDS: dict[str, list[str]] = {
    "calibrate": ["--device", "nothing"],
    "studio": ["--token", "short"],
    "data prepare": ["nothing-there.txt"],
    "train": ["nothing-there"],
    "bench": ["nothing-there"],
    "tune": ["nothing-there"],
    "verify": ["nothing-there"],
}


@dataclass(frozen=True)
class Known:
    """A command: how many arguments it takes, and its options, each with the kind of its value, if any."""

    arguments: int
    options: list[tuple[str, str | None]]


@cache
def commands() -> dict[str, Known]:
    """Every command; the code that prints their refusals is loaded here, once for all cases."""
    import typer.main

    from meshwright.cli import app

    found: dict[str, Known] = {}

    def walk(group: Any, path: str) -> None:
        for name, one in group.commands.items():
            full = f"{path} {name}".strip()
            if hasattr(one, "commands"):
                walk(one, full)
                continue
            options = [param for param in one.params if param.param_type_name == "option"]
            told = inspect.signature(one.callback).parameters
            kinds = [(param.opts[0], None if param.is_flag else str(told[param.name].annotation)) for param in options]
            found[full] = Known(len(one.params) - len(options), kinds)

    walk(typer.main.get_command(app), "")
    with suppress(Refused):
        command("job", "--nothing")
    return found


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of command lines."""
    known, number = commands(), 0
    while True:
        number += 1
        name = chance.choice(list(known))
        words = name.split()
        if name not in GUARDS:
            words += ["demo" if chance.random() < 0.4 else _word(chance) for _ in range(known[name].arguments)]
        for _ in range(chance.choice([0, 1, 1, 2, 3]) if known[name].options else 0):
            option, kind = chance.choice(known[name].options)
            words.append(option)
            if kind is not None:
                numbers = "int" in kind or "float" in kind
                words.append(chance.choice(NUMBERS) if numbers and chance.random() < 0.9 else _word(chance))
        if chance.random() < 0.1:
            words.insert(chance.randrange(len(words) + 1), _word(chance))
        yield Case(f"{number} {' '.join(words)}"[:80], partial(_run, words + GUARDS.get(name, [])), seconds=60.0)


def _word(chance: random.Random) -> str:
    return chance.choice(WORDS if chance.random() < 0.6 else [text for text in TEXTS if text not in ("/", "~")])


def _run(words: list[str], folder: Path) -> None:
    command(*words)


COMMAND_LINES = Family("command lines", draw, weight=2.0)
