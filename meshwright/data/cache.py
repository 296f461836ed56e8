"""The cache folder: built beside, brought to the disk, then renamed, so that a finished folder is always whole."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from meshwright.atomic import sync

_LOCK = ".lock"
_PARTIAL = ".partial"
# A builder needs a moment between making its folder and locking it.
_YOUNG_S = 60.0


def cache_root(given: str | None) -> Path:
    """The folder that holds prepared tokens: the given one, else the user's cache folder."""
    if given is not None:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"


@contextmanager
def building(final: Path, is_complete: Callable[[Path], bool]) -> Iterator[Path]:
    """A new folder that takes the final name when the block ends well and is gone otherwise.

    Of two builders of the same folder the later one yields: a complete folder is never replaced.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.parent / f".{final.name}.{uuid4().hex}{_PARTIAL}"
    partial.mkdir()
    try:
        # The lock says that the builder is alive; it ends with the process, however that ends.
        with (partial / _LOCK).open("ab") as lock:
            with suppress(OSError):  # some file systems have no locks; nothing is swept there
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield partial
            sync(partial)
            _publish(partial, final, is_complete)
            sync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what builders left that were killed."""
    for partial in root.glob(f".*{_PARTIAL}"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime < _YOUNG_S:
                continue
            with (partial / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial)


def _publish(partial: Path, final: Path, is_complete: Callable[[Path], bool]) -> None:
    while True:
        try:
            partial.rename(final)
            return
        except OSError:
            if not final.exists():
                raise
        if is_complete(final):
            return
        aside = final.parent / f".{final.name}.{uuid4().hex}{_PARTIAL}"
        with suppress(FileNotFoundError):  # another builder was faster to clear the damaged folder away
            final.rename(aside)
            shutil.rmtree(aside)
