"""A folder that appears whole or not at all: made beside its place, then renamed."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.data.store import sync
from meshwright.errors import UserError


@contextmanager
def whole_folder(path: Path, needed_bytes: int) -> Iterator[Path]:
    """An empty folder to fill, which becomes `path` when all went well and is gone otherwise."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder; choose another or remove it")
    path = path.absolute()
    new_parents = [parent for parent in path.parents if not parent.exists()]
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        draft.mkdir(parents=True)
        free = shutil.disk_usage(draft).free
        if free < needed_bytes:
            raise UserError(
                f"{path} needs {needed_bytes / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB free; free space or "
                "choose another disk"
            )
        yield draft
        for made in (*draft.rglob("*"), draft):
            sync(made)
        draft.rename(path)
        sync(path.parent)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        for parent in new_parents:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError):
            raise refusal(path, error) from error
        raise


def refusal(path: Path, error: OSError) -> Exception:
    """What the disk would not do, as the user's mistake where it is one."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{path} cannot be written (no space is left); free some or choose a folder on another disk")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(f"{path} cannot be written (writing is not allowed); choose a folder you can write to")
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY):
        return UserError(f"{path} cannot be written (a file is in its way); choose another folder")
    return error
