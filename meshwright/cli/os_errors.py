"""Errors of the operating system about paths the user gave: too long, unreadable, or not a folder."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import UserError

_FULL, _CLOSED = (errno.ENOSPC, errno.EDQUOT), (errno.EACCES, errno.EPERM, errno.EROFS)
_REMEDIES = dict.fromkeys(_FULL, "free some space") | dict.fromkeys(_CLOSED, "check its permissions")
_THE_MACHINE_S = (*_FULL, *_CLOSED, errno.ENAMETOOLONG, errno.ELOOP)
"""No program can fix these: the user must change a disk, a permission or a path."""
_OF_A_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.ENXIO)
"""A user error if the user gave the path; an internal error if the path is ours."""


def require_text(arguments: Sequence[str]) -> None:
    """Reject arguments that no file, field or script can accept."""
    for argument in arguments:
        if "\0" in argument or any("\ud800" <= character <= "\udfff" for character in argument):
            raise UserError(f"{_shown(argument)} is not valid UTF-8; write the argument, or rename the file, in UTF-8")


@contextmanager
def refusals_of_the_system(arguments: Sequence[str]) -> Iterator[None]:
    """Turn an OS error about a path that the user gave into one sentence; any other is an internal error."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            raise
        name = "the disk" if error.filename is None else os.fsdecode(error.filename)
        if error.errno in _THE_MACHINE_S or (error.errno in _OF_A_PATH and _given(name, arguments)):
            remedy = _REMEDIES.get(error.errno, "give another path")
            raise UserError(f"{_shown(name)}: {error.strerror}; {remedy}") from error
        raise


def _given(path: str, arguments: Sequence[str]) -> bool:
    """Whether the path is an argument, or the value of an option or field, or lies under one that is a file."""
    values = {value for argument in arguments for value in (argument, argument.partition("=")[2].strip("\"'"))}
    given = {Path(value).absolute() for value in values if value}
    found = Path(path).absolute()
    return found in given or any(parent in given and not parent.is_dir() for parent in found.parents)


def _shown(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    return text if len(text) <= 80 else f"{text[:77]}..."
