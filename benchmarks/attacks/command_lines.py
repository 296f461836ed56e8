"""Garbage command lines: words of ours, options of ours and nonsense in any order."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attacks.case import Case, Family, command

COMMANDS = ["job show", "job check", "plan", "report", "checkpoint list", "data inspect", "schedule show", "status"]
COMMANDS += ["logs", "eval", "generate", "replay", "verify", "doctor", "job recipes", "checkpoint verify"]
OPTIONS = ["--set", "--json", "--steps", "--on", "--model", "--only", "--seed", "--cluster", "--out", "--help"]
VALUES = ["demo", "-1", "0", "1e999", "nan", "", " ", "\n", "/dev/null", "/", "..", "run.folder=", "model.width=-1"]
VALUES += ["[", "{}", "layout.tp=99999999999999999999", "a.b.c=1", "model=1", "=", "=1", "model.width==1", "é\u202e"]
VALUES += ["x" * 5000, "~", "%s", "optimizer.lr=inf", "batch.global_batch=1e3", "data.sources=[1]"]
VALUES += ["model.name='\\u0000'", "run.folder='a\\nb'"]


def draw(chance: random.Random) -> Iterator[Case]:
    """Command lines without end."""
    while True:
        words = chance.choice(COMMANDS).split()
        for _ in range(chance.randrange(5)):
            words.append(chance.choice(VALUES if chance.random() < 0.6 else OPTIONS))
        yield Case(" ".join(words)[:80], partial(_run, words))


def _run(words: list[str], folder: Path) -> None:
    command(*words)


COMMAND_LINES = Family("command lines", draw)
