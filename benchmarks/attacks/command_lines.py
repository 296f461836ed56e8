"""Garbage command lines: every command and option there is, with words of ours and nonsense in any order."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attacks.case import Case, Family, command
from attacks.mutations import TEXTS

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
# These would work for minutes, or for ever, if all they are told were right: something always is not.
GUARDS: dict[str, list[str]] = {
    "calibrate": ["--device", "nothing"],
    "studio": ["--token", "short"],
    "data prepare": ["nothing-there.txt"],
    "train": ["nothing-there"],
    "bench": ["nothing-there"],
    "tune": ["nothing-there"],
    "verify": ["nothing-there"],
}


def commands() -> dict[str, list[tuple[str, bool]]]:
    """Every command with its options, and whether each takes a value."""
    import typer.main

    from meshwright.cli import app

    found: dict[str, list[tuple[str, bool]]] = {}

    def walk(group: Any, path: str) -> None:
        for name, one in group.commands.items():
            full = f"{path} {name}".strip()
            if hasattr(one, "commands"):
                walk(one, full)
            else:
                options = [param for param in one.params if param.param_type_name == "option"]
                found[full] = [(param.opts[0], not param.is_flag) for param in options]

    walk(typer.main.get_command(app), "")
    return found


def draw(chance: random.Random) -> Iterator[Case]:
    """Command lines without end."""
    known, number = commands(), 0
    while True:
        number += 1
        name = chance.choice(list(known))
        words = name.split() + GUARDS.get(name, [])
        if name not in GUARDS and chance.random() < 0.7:
            words += [_word(chance) for _ in range(chance.choice([1, 1, 1, 2]))]
        for _ in range(chance.randrange(4)):
            option, valued = chance.choice(known[name] or [("--json", False)])
            if option == "--help" and chance.random() < 0.9:
                continue  # a page of help is all there would be
            words.append(option)
            if valued and chance.random() < 0.95:
                words.append(chance.choice(NUMBERS) if chance.random() < 0.5 else _word(chance))
        if chance.random() < 0.2:
            words.insert(chance.randrange(len(words) + 1), _word(chance))
        yield Case(f"{number} {' '.join(words)}"[:80], partial(_run, words), seconds=40.0)


def _word(chance: random.Random) -> str:
    return chance.choice(WORDS if chance.random() < 0.6 else [text for text in TEXTS if text not in ("/", "~")])


def _run(words: list[str], folder: Path) -> None:
    command(*words)


COMMAND_LINES = Family("command lines", draw, weight=2.0)
