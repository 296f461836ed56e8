"""Training runs killed at a random moment, also during a save, and resumed until they finish."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attacks.case import Case, Family, InternalError
from attacks.tiny_run import in_child, left_alone, require_equal, train

CALLS = {"write": 40, "fsync": 60, "rename": 10, "mkdir": 10, "unlink": 6}
"""System calls, with about how many of them a run makes: a kill at one of them is reproducible."""


@dataclass(frozen=True)
class Kill:
    """When a training run dies, and how."""

    signal: int
    call: str | None
    """A call of the system, at whose `number`-th time it dies; None: so many hundredths of a second after its start."""
    number: int
    after: bool = False
    """Of the call, not before it."""

    def __str__(self) -> str:
        at = f"{self.number * 10} ms" if self.call is None else f"{self.call} {self.number}{' done' * self.after}"
        return f"{signal.Signals(self.signal).name} at {at}"


def draw(chance: random.Random) -> Iterator[Case]:
    """Training runs killed once or twice."""
    left_alone()  # once, and for all processes that are forked from here
    while True:
        kills = [_kill(chance) for _ in range(chance.choice((1, 1, 1, 2)))]
        yield Case(", ".join(map(str, kills)), partial(_run, kills), seconds=60.0)


def _kill(chance: random.Random) -> Kill:
    number = signal.SIGKILL if chance.random() < 0.75 else signal.SIGTERM
    if chance.random() < 0.3:
        return Kill(number, None, chance.randrange(100))
    call = chance.choice(list(CALLS))
    return Kill(number, call, 1 + chance.randrange(CALLS[call]), chance.random() < 0.5)


def _run(kills: list[Kill], folder: Path) -> None:
    for number, kill in enumerate(kills):
        _killed(kill, resume=number > 0)
    if why := in_child(lambda: train(resume=True))[1]:
        raise InternalError(why)
    require_equal(Path("run"))


def _killed(kill: Kill, resume: bool) -> None:
    def work() -> None:
        if kill.call is not None:
            setattr(os, kill.call, _deadly(getattr(os, kill.call), kill))
        train(resume)

    def strike(process: int) -> None:
        if kill.call is None:
            time.sleep(kill.number / 100)
            os.kill(process, kill.signal)

    status, why = in_child(work, strike)
    early = not os.WIFEXITED(status) or (kill.signal == signal.SIGTERM and "KeyboardInterrupt" in why)
    if why and not early:
        raise InternalError(why)


def _deadly(real: Callable[..., Any], kill: Kill) -> Callable[..., Any]:
    left = [kill.number]

    def call(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not kill.after:
            os.kill(os.getpid(), kill.signal)
        result = real(*given, **named)
        if left[0] == 0 and kill.after:
            os.kill(os.getpid(), kill.signal)
        return result

    return call


KILLS = Family("kills", draw, weight=0.5)
