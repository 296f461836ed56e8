"""Text that is safe in scripts, run files and messages: one line, and no passwords."""

import re
import unicodedata
from urllib.parse import parse_qsl

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<place>[^/?#\s]*)(?P<path>[^?#\s]*)(?:\?(?P<query>[^#\s]*))?"
)
_PLAIN_QUERIES = (
    "alt", "config", "dl", "download", "format", "generation", "part", "raw", "ref", "rev", "revision", "split",
    "version", "versionid",
)  # fmt: skip
"""Parameters of an address that identify the file; any other may be a credential."""
HIDDEN = "[hidden]"


def odd_character(text: str, many_lines: bool = False) -> str | None:
    """The first character that names and paths should not have, as U+000A; `many_lines` allows tabs and line ends."""
    for character in text:
        if many_lines and character in "\n\t":
            continue
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):  # controls, lone surrogates, line separators
            return f"U+{ord(character):04X}"
    return None


def secret_in(text: str) -> str | None:
    """What in a text may be a secret: the user of an address, or a parameter that plain addresses do not have."""
    for url in _URL.finditer(text):
        user, at, _ = url["place"].rpartition("@")
        if at and (":" in user or url["scheme"].lower() in ("http", "https")):
            return "the user and password of an address"
        for name, _ in parse_qsl(url["query"] or "", keep_blank_values=True):
            if name.lower() not in _PLAIN_QUERIES and "=" in (url["query"] or ""):
                return f"the parameter {name[:40]} of an address"
    return None


def without_secrets(text: str) -> str:
    """The text with its addresses stripped of what `secret_in` finds: no user, and parameters as [hidden]."""

    def plain(url: re.Match[str]) -> str:
        if secret_in(url.group()) is None:
            return url.group()
        place = url["place"].rpartition("@")[2]
        return f"{url['scheme']}://{place}{url['path']}" + (f"?{HIDDEN}" if url["query"] else "")

    return _URL.sub(plain, text)
