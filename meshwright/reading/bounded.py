"""Bytes, text and JSON from a file, within the limits of size, depth and content that this program writes."""

import errno
import json
import os
import stat
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

FILE_BYTES = 1 << 20
"""Size limit of a small file of a run: a job, an environment, a submission."""
DEEPEST = 64
"""Maximum nesting of lists and tables."""
_DIGITS = 19
"""A whole number with fewer digits fits 64 bits; one with more is not a count, step or size."""
_TO_ZERO = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))


class Unfit(ValueError):
    """A file or line that is rejected, and briefly why."""


def open_plain(path: Path | str, holder: int | None = None) -> int:
    """A descriptor of a regular file; links are not followed, and a pipe does not block."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=holder)
    except FileNotFoundError:
        raise
    except OSError as error:
        link = error.errno == errno.ELOOP
        raise Unfit("it is a link" if link else f"it cannot be opened: {error.strerror}") from error
    except ValueError:  # a name with a zero byte
        raise Unfit("its name is not a valid file name") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unfit("it is not a regular file")
    return descriptor


def read_plain(path: Path, most: int = FILE_BYTES, *, cut: bool = False) -> bytes:
    """A plain file's bytes; one with more than `most` is rejected, or truncated where its beginning is enough."""
    descriptor = open_plain(path)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise Unfit(f"it cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(data) > most and not cut:
        raise Unfit(f"it has more than {most:,} bytes")
    return data[:most]


def read_text(path: Path, most: int = FILE_BYTES) -> str:
    """The first bytes of a plain file as text to show; invalid UTF-8 is replaced."""
    return read_plain(path, most, cut=True).decode("utf-8", "replace")


def read_object(path: Path, most: int = FILE_BYTES) -> dict[str, Any]:
    """The table of fields in a regular JSON file."""
    value = parse_json(read_plain(path, most))
    if not isinstance(value, dict):
        raise Unfit("it is not a table of fields")
    return value


def parse_json(data: bytes, *, flat: bool = False) -> Any:
    """JSON as we write it: UTF-8, a few levels deep, whole numbers of 64 bits, and no NaN or infinity.

    `flat` if the number of brackets already shows that nothing is deep.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Unfit("it is not UTF-8") from None
    try:
        value = (_STRICT if _has_long_number(data) else _PLAIN).decode(text)
    except Unfit:
        raise
    except (ValueError, RecursionError) as error:
        raise Unfit("it is not JSON" if isinstance(error, ValueError) else "it is nested too deeply") from None
    if not flat and data.count(b"[") + data.count(b"{") > DEEPEST and not _is_shallow(value):
        raise Unfit(f"it is nested more than {DEEPEST} levels deep")
    if b"\\u" in data:
        try:  # half a surrogate pair is not a character, and cannot be printed
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise Unfit("it contains half a character") from None
    return value


def _has_long_number(data: bytes) -> bool:
    """Whether there are so many digits in a row that a number may be too large, which needs a slower check."""
    return b"0" * _DIGITS in data.translate(_TO_ZERO)


def printable(text: str, most: int = 500) -> str:
    """A text from a file as a terminal may show it: control characters replaced, a long text truncated."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in text[:most])
    return shown + " …" if len(text) > most else shown


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS + 1 or not -(2**63) <= (value := int(digits)) < 2**63:
        raise Unfit("a number in it does not fit 64 bits")
    return value


def _refuse(word: str) -> NoReturn:
    raise Unfit(f"{word} is not JSON")


_PLAIN = json.JSONDecoder(parse_constant=_refuse)
_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_int=_whole)


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST + 1):
        tables = (one.values() for one in level if isinstance(one, dict))
        level = [*chain.from_iterable(tables), *chain.from_iterable(one for one in level if isinstance(one, list))]
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return True
    return False
