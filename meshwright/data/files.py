"""The door for files that others wrote: regular ones only, and small ones read whole only up to a stated size."""

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

SMALL_BYTES = 64 << 20
"""A manifest, a tokenizer or a template that is larger is none."""


def open_regular(path: Path) -> io.FileIO:
    """The bytes of a regular file, unbuffered; an `OSError` for a pipe, a device or a socket, none of which may end."""
    _require_regular(path, path.stat())
    # It may have been replaced since: without O_NONBLOCK a pipe would wait for whoever writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor, "r")


def read_text(path: Path) -> str:
    """The text of a small file; an `OSError` where it is larger than SMALL_BYTES, a `ValueError` where not UTF-8."""
    with open_regular(path) as stream:
        raw = io.BufferedReader(stream).read(SMALL_BYTES + 1)
    if len(raw) > SMALL_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {SMALL_BYTES >> 20} MiB", str(path))
    return raw.decode("utf-8")


def read_json(path: Path) -> Any:
    """The value in a small file of JSON; a `ValueError` where it is none."""
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_regular_inside(path: Path, folder: Path) -> bool:
    """Whether a path below a folder is a regular file that lies there itself, not elsewhere behind a link."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        path.stat()  # a link to nothing, or to itself, is reported as such
        target = path.resolve()
        return target.is_relative_to(folder.resolve()) and target.is_file()
    return stat.S_ISREG(found.st_mode)


def _require_regular(path: Path, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
