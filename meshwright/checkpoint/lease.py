"""Who may write checkpoints of a run: the attempt that started last.

An attempt's lease is a folder, `checkpoints/.attempt-N`, in which its checkpoints are written before they are renamed
into place. A later attempt revokes all earlier leases by renaming them, which is atomic: a process that was believed
dead and comes back finds its folder gone, and nothing it writes can become visible.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Self

from meshwright.atomic import sync
from meshwright.errors import UserError

_LEASE = re.compile(r"\.attempt-(\d{6})")
RESTORING = ".restoring-"
"""Where a checkpoint is restored from a backup until it is complete."""


class Fenced(UserError):
    """Another attempt has taken over the run."""


class Lease:
    """The right to write into one run folder."""

    def __init__(self, run: Path, attempt: int) -> None:
        """Of an attempt that some rank has claimed."""
        self.run, self.attempt = Path(run), attempt
        self.folder = self.run / "checkpoints" / f".attempt-{attempt:06d}"

    @classmethod
    def claim(cls, run: Path, at_least: int = 0) -> Self:
        """Start the next attempt, end the others and remove what they left unfinished."""
        root = Path(run) / "checkpoints"
        root.mkdir(parents=True, exist_ok=True)
        attempt = max([at_least, *(number + 1 for number in _leases(root))])
        while True:
            try:
                (root / f".attempt-{attempt:06d}").mkdir()
                break
            except FileExistsError:  # another claimed at the same time; the later number wins
                attempt += 1
        for number in _leases(root):
            if number < attempt:
                with suppress(FileNotFoundError):  # another claim revoked it
                    take_away(root / f".attempt-{number:06d}")
        for left in (*root.glob(".removed-*"), *root.glob(f"{RESTORING}*")):
            discard(left)
        sync(root.parent)
        return cls(run, attempt)

    def require(self) -> None:
        """Raise Fenced where a later attempt has taken over."""
        try:
            self.folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise Fenced(
                f"run.folder = {self.run} was taken over by a later attempt than this one ({self.attempt}); this "
                "process stops and has changed nothing since then"
            ) from None
        except OSError:  # a disk that does not answer says nothing about another attempt
            return

    def give_up(self) -> None:
        """End an attempt cleanly."""
        with suppress(FileNotFoundError):
            take_away(self.folder)


def take_away(path: Path) -> None:
    """Remove a folder so that it disappears at once, whatever happens to its contents."""
    aside = path.with_name(f".removed-{path.name}-{os.getpid()}")
    path.rename(aside)
    discard(aside)


def discard(path: Path) -> None:
    """Remove whatever has this name; of a link only the link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _leases(root: Path) -> list[int]:
    return [int(found[1]) for entry in root.iterdir() if (found := _LEASE.fullmatch(entry.name))]
