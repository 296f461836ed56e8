"""What the operating system refuses of what the user gave: a path that is too long, unreadable, or no folder."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import UserError

_FULL, _CLOSED = (errno.ENOSPC, errno.EDQUOT), (errno.EACCES, errno.EPERM, errno.EROFS)
_REMEDIES = dict.fromkeys(_FULL, "free some space") | dict.fromkeys(_CLOSED, "check its permissions")
_THE_MACHINE_S = (*_FULL, *_CLOSED, errno.ENAMETOOLONG, errno.ELOOP)
"""No program makes these go away: whoever runs it must change a disk, a permission or a path."""
_OF_A_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.ENXIO)
"""The user's mistake where the path is one he gave; where it is one of ours, an error of ours."""


def require_text(arguments: Sequence[str]) -> None:
    """Refuse words that no file, field or script can be given."""
    for argument in arguments:
        if "\0" in argument or any("\ud800" <= character <= "\udfff" for character in argument):
            raise UserError(f"{_shown(argument)} is no text in UTF-8; write the argument, or name the file, in UTF-8")


@contextmanager
def refusals_of_the_system(arguments: Sequence[str]) -> Iterator[None]:
    """Turn the system's refusal of a path that the user gave into one sentence; any other is an error of ours."""
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
    """Whether the path is an argument, or an option's or a field's value; or is looked for below one that is a file."""
    values = {value for argument in arguments for value in (argument, argument.partition("=")[2].strip("\"'"))}
    given = {Path(value).absolute() for value in values if value}
    found = Path(path).absolute()
    return found in given or any(parent in given and not parent.is_dir() for parent in found.parents)


def _shown(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    return text if len(text) <= 80 else f"{text[:77]}..."
