"""What every command shares: consoles, failures, JSON."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from meshwright.errors import CONTROL_CHARACTERS, UserError, print_error


def stdout_console() -> Console:
    """Console for results."""
    return Console()


def stderr_console() -> Console:
    """Console for progress, so that results can be piped."""
    return Console(stderr=True)


@contextmanager
def rank_failures_told() -> Iterator[None]:
    """If a rank dies inside, say which and why (with its traceback under --debug) and exit with 1."""
    from meshwright.launch.rank_failure import RankFailure

    try:
        yield
    except RankFailure as failure:
        if "--debug" in sys.argv:
            print(failure.rank_traceback, file=sys.stderr)
        print_error(failure)
        raise typer.Exit(1) from None


def require_new(path: Path | None, option: str, force: bool) -> None:
    """Refuse to overwrite the file that an option names, before any work is done for it."""
    if path is not None and path.is_file() and not force:
        raise UserError(f"{option} = {path} exists; add --force to overwrite it, or name another file")


def write_file(path: Path, text: str, option: str) -> None:
    """Write the file that an option names; if that fails, raise an error of one sentence."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{option} = {path} cannot be written ({error.strerror}); name a file in an existing folder"
        ) from error


def print_written(text: str, end: str = "\n") -> None:
    """Print what a model wrote at once; on a terminal without the control characters that could command it."""
    print(harmless(text), end=end, flush=True)


def harmless(text: str) -> str:
    """A text from elsewhere for standard output: on a terminal without the control characters that could command it."""
    return text.translate(CONTROL_CHARACTERS) if sys.stdout.isatty() else text


def print_json(value: Any) -> None:
    """Print one JSON document to standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
