"""Read small text files written by people, settings rather than data, with a size limit."""

import json
import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from meshwright.errors import UserError

_LARGEST = 4 << 20
"""Bytes; settings files are far smaller, and anything larger is some other file."""
_LARGEST_TOML = 256 << 10
"""Characters. tomllib takes seconds and hundreds of MiB for a MiB of short headers."""
_DEEPEST_KEY = 16
"""Names in a dotted key or a table's header, whose square tomllib takes in time and memory."""
_STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|(?!""").)*+(?:""")?|"(?:\\.|[^"\\\n])*+"?'''
    r"""|'''(?:(?!''').)*+(?:''')?|'[^'\n]*+'?|#[^\n]*+""",
    re.DOTALL,
)
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_DEEPEST_KEY}}}")


def read_settings_text(path: Path, remedy: str) -> str:
    """The text of a settings file; anything but a small UTF-8 text is rejected with the remedy."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UserError(f"{path} is larger than {_LARGEST >> 20} MiB, too large for a settings file; {remedy}")
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; {remedy}") from None
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {remedy}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None


def json_table(path: Path, text: str, remedy: str) -> dict[str, Any]:
    """The table of fields in a JSON text."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError too
        raise UserError(f"{path} cannot be read as JSON ({reason(error)}); {remedy}") from None
    if not isinstance(table, dict):
        raise UserError(f"{path} contains {type(table).__name__} instead of a table of fields; {remedy}")
    return table


def toml_table(text: str) -> dict[str, Any]:
    """The table in a TOML text; anything else is a ValueError."""
    if len(text) > _LARGEST_TOML:
        raise ValueError(f"it has more than {_LARGEST_TOML >> 10} Ki characters, too many for settings")
    # Without its strings, dots that follow names are those of keys; a quoted name counts like a bare one.
    if _DEEP_KEY.search(_STRING_OR_COMMENT.sub("_", text)):
        raise ValueError(f"a key has more than {_DEEPEST_KEY} names with dots between them; shorten it")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(reason(error)) from None


def require_undotted_keys(table: dict[str, Any], free: Collection[str] = (), above: str = "") -> None:
    """Refuse a name with a dot in it, as `"model.width" = 64`: everywhere else it would look like the field of a table.

    In the tables named in `free`, as `section.field`, names are the user's own.
    """
    for key, value in table.items():
        if "." in key:
            raise ValueError(
                f"the quotes make one name of {key!r}, and no setting has a dot in its name; leave them out to set a "
                "field of a table"
            )
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict) and above + key not in free:
                require_undotted_keys(inner, free, f"{above}{key}.")


def reason(error: Exception) -> str:
    """Why a text could not be parsed, in a few words."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number has too many digits" if "digits" in str(error) else str(error)
