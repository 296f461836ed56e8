"""What a command of the `cli` fixture did."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class CommandResult:
    """What a command did."""

    code: int
    out: str
    err: str


Cli = Callable[..., CommandResult]
