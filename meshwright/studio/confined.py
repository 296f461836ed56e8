"""File access confined to one folder: no name leads outside, and links are not followed."""

import os
from pathlib import Path

from meshwright.atomic import write_atomic_in
from meshwright.reading import Unfit, open_plain

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Outside(Exception):
    """A name that is not a regular file or folder inside the root."""


def open_inside(root: Path, *parts: str) -> int:
    """A descriptor of a regular file below `root`, opened one folder at a time so that no link is followed."""
    holder = _folder(root, *parts[:-1])
    try:
        return open_plain(_name(parts[-1]), holder)
    except (OSError, Unfit) as error:
        raise Outside(parts[-1]) from error
    finally:
        os.close(holder)


def read_inside(root: Path, *parts: str, most: int, start: int = 0) -> bytes:
    """At most `most` bytes of a regular file below `root`."""
    descriptor = open_inside(root, *parts)
    try:
        return os.pread(descriptor, most, start)
    except OSError as error:
        raise Outside(parts[-1]) from error
    finally:
        os.close(descriptor)


def write_inside(root: Path, *parts: str, content: bytes) -> None:
    """Write a file below `root`, complete or not at all; a link of its name is replaced, not followed."""
    holder = _folder(root, *parts[:-1])
    try:
        write_atomic_in(holder, _name(parts[-1]), content)
    finally:
        os.close(holder)


def names_inside(root: Path, *parts: str) -> list[str]:
    """The names of the regular files in a folder below `root`; empty if the folder does not exist."""
    try:
        holder = _folder(root, *parts)
    except Outside:
        return []
    try:
        with os.scandir(holder) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    finally:
        os.close(holder)


def _folder(root: Path, *parts: str) -> int:
    try:
        holder = os.open(root, _FOLDER)
    except OSError as error:
        raise Outside(str(root)) from error
    for part in parts:
        try:
            inner = os.open(_name(part), _FOLDER | os.O_NOFOLLOW, dir_fd=holder)
        except OSError as error:
            raise Outside(part) from error
        finally:
            os.close(holder)
        holder = inner
    return holder


def _name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise Outside(name)
    return name
