"""What every command shares: its consoles, its way to fail, its JSON."""

import json
import sys
from typing import Any

from rich.console import Console


def stdout_console() -> Console:
    """Where results go."""
    return Console()


def stderr_console() -> Console:
    """Where progress goes, so that results can be piped."""
    return Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
