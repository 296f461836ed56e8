"""What every command shares: its consoles, its way to fail, its JSON."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console


def stdout_console() -> Console:
    """Where results go."""
    return Console()


def stderr_console() -> Console:
    """Where progress goes, so that results can be piped."""
    return Console(stderr=True)


@contextmanager
def rank_failures_told() -> Iterator[None]:
    """Where a rank dies inside, say which and why, with its traceback under --debug, and exit with 1."""
    from meshwright.launch.failures import RankFailure

    try:
        yield
    except RankFailure as failure:
        if "--debug" in sys.argv:
            print(failure.rank_traceback, file=sys.stderr)
        print(f"meshwright: {failure}", file=sys.stderr)
        raise typer.Exit(1) from None


def write_file(path: Path, text: str, option: str) -> None:
    """Write what an option names a file for; one that cannot be is refused in a sentence."""
    from meshwright.errors import UserError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{option} = {path} cannot be written ({error.strerror}); name a file in a folder that is there"
        ) from error


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
