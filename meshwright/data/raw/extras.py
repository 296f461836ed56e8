"""Readers that are not installed with the rest: refused by name, with the command that adds them."""

import importlib
from typing import Any

from meshwright.errors import UserError

_PACKAGE = {"pyarrow": "pyarrow", "s3fs": "s3fs", "aiohttp": "aiohttp"}


def need(module: str, what: str) -> Any:
    """The module, or one sentence that says what lacks it and how to add it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = _PACKAGE[module.partition(".")[0]]
        raise UserError(
            f"{what} needs {package}, which is not installed; run pip install {package} or pip install "
            "'meshwright[data]'"
        ) from error
