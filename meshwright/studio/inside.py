"""Files of one folder and of nothing else: no name leads out of it, and no link is followed."""

import os
import stat
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Outside(Exception):
    """A name that is not a plain file or folder inside."""


def open_inside(root: Path, *parts: str) -> int:
    """A descriptor of a plain file below `root`, opened one folder at a time so that no link can slip in between."""
    holder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            inner = _open(part, _FOLDER, holder)
            os.close(holder)
            holder = inner
        # Without O_NONBLOCK a pipe that lies there would keep us waiting.
        found = _open(parts[-1], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, holder)
    finally:
        os.close(holder)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise Outside(parts[-1])
    return found


def read_inside(root: Path, *parts: str, most: int, start: int = 0) -> bytes:
    """At most so many bytes of a plain file below `root`."""
    descriptor = open_inside(root, *parts)
    try:
        return os.pread(descriptor, most, start)
    finally:
        os.close(descriptor)


def names_inside(root: Path, *parts: str) -> list[str]:
    """The names of the plain files in a folder below `root`; none where there is no such folder."""
    try:
        holder = os.open(root, _FOLDER)
        for part in parts:
            inner = _open(part, _FOLDER, holder)
            os.close(holder)
            holder = inner
    except (OSError, Outside):
        return []
    try:
        with os.scandir(holder) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    finally:
        os.close(holder)


def _open(name: str, flags: int, holder: int) -> int:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise Outside(name)
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=holder)
    except OSError as error:
        raise Outside(name) from error
