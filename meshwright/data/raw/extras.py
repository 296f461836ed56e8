"""Readers that are not installed with the rest: refused by name, with the command that adds them."""

import importlib
from typing import Any

from meshwright.errors import UserError

_PACKAGE = {
    "pyarrow": ("pyarrow", "data"),
    "s3fs": ("s3fs", "data"),
    "aiohttp": ("aiohttp", "data"),
    "PIL": ("pillow", "media"),
    "av": ("av", "media"),
}
"""By what a module is imported as: the package, and the extra of ours that has it."""


def need(module: str, what: str) -> Any:
    """The module, or one sentence that says what lacks it and how to add it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, extra = _PACKAGE[module.partition(".")[0]]
        raise UserError(
            f"{what} needs {package}, which is not installed; run pip install {package} or pip install "
            f"'meshwright[{extra}]'"
        ) from error
