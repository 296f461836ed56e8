"""How this program starts Python: never with the working directory on the path, where a module may be a stranger's."""

import os
import site
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def python_command(*words: str, python: str | None = None) -> list[str]:
    """The command line of a Python process with these words, such as `-m meshwright`; by default of this Python."""
    return [python or sys.executable, "-P", *words]


def python_path() -> str:
    """PYTHONPATH with the folder this package is imported from, unless it is installed.

    An empty entry is left out: Python reads it as the working directory.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if str(_PACKAGE) not in (*installed, *map(os.path.abspath, paths)):
        paths.insert(0, str(_PACKAGE))
    return os.pathsep.join(paths)


def python_variables() -> dict[str, str]:
    """Variables for a Python process on this machine, and for those that it starts by itself."""
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": python_path()}
