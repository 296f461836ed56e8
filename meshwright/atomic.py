"""Files and folders that appear complete or not at all: written under a temporary name, then renamed."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from meshwright.errors import UserError


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A temporary name to write a file to; it becomes `path` on success and is removed otherwise.

    The name cannot be guessed, so nothing can already be there, not even a link in someone else's folder. A `durable`
    file is on disk before it gets its final name.
    """
    draft = _draft(path)
    try:
        yield draft
        if durable:
            sync(draft)
        draft.replace(path)
        if durable:
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a whole file (text as UTF-8): readers see either the old contents or all of the new."""
    with atomic_file(path, durable=durable) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def write_atomic_in(folder: int, name: str, content: bytes) -> None:
    """The same in a folder that is open: whatever its path leads to by now, nothing else is written."""
    draft = _draft(Path(name)).name
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill; it becomes `path` on success and is removed otherwise, with any new parents."""
    new_parents = [parent for parent in path.absolute().parents if not parent.exists()]
    draft = _draft(path)
    try:
        draft.mkdir(parents=True)
        yield draft
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        for parent in new_parents:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
        raise


@contextmanager
def new_folder(path: Path, needed_bytes: int) -> Iterator[Path]:
    """The same for a folder that the user named: anything in the way is reported in one sentence."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder; choose another or remove it")
    try:
        with atomic_folder(path) as draft:
            free = shutil.disk_usage(draft).free
            if free < needed_bytes:
                raise UserError(
                    f"{path} needs {needed_bytes / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB free; free space "
                    "or choose another disk"
                )
            yield draft
            for made in (*draft.rglob("*"), draft):
                sync(made)
        sync(path.absolute().parent)
    except OSError as error:
        raise disk_refusal(str(path), error) or error from error


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_refusal(subject: str, error: OSError) -> UserError | None:
    """A disk error as one sentence about `subject`; None if the error is of another kind."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem, remedy = "no space left", "free some or choose a folder on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        problem, remedy = "permission denied", "choose a folder you can write to"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ELOOP, errno.ENXIO):
        problem, remedy = "a file is in the way", "choose another folder"
    else:
        return None
    return UserError(f"{subject} cannot be written ({problem}); {remedy}")


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name[:200]}.{uuid4().hex}.new")
