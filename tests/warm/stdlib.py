"""A smaller `builtin:stdlib` for tests: to prepare all of it takes longer than most of what is tested."""

import sysconfig
from pathlib import Path
from typing import Any

PACKAGE = "asyncio"


def narrow_stdlib() -> None:
    """Have `builtin:stdlib` found in one package's folder."""
    whole = sysconfig.get_path

    def get_path(name: str, *given: Any, **named: Any) -> str:
        path = whole(name, *given, **named)
        return str(Path(path) / PACKAGE) if name == "stdlib" else path

    sysconfig.get_path = get_path
