"""Files on this machine: folders walked in a fixed order, never followed elsewhere, and the standard library."""

import os
import sysconfig
from pathlib import Path

from meshwright.data.files import is_regular_inside
from meshwright.errors import UserError

STDLIB = "builtin:stdlib"
SYNTHETIC = "builtin:synthetic"
_NOT_STDLIB = frozenset({"site-packages", "dist-packages"})


def walk(folder: Path, leave_out: frozenset[str] = frozenset()) -> list[Path]:
    """The visible files below a folder, sorted; links to folders are not followed, since they may form loops."""
    paths = []
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def regular_inside(paths: list[Path], folder: Path) -> list[Path]:
    """The paths below a folder, each refused by name unless it is a regular file that lies there itself."""
    for path in paths:
        try:
            if is_regular_inside(path, folder):
                continue
        except OSError as error:
            raise unreadable(str(path), error) from error
        what = f"leads out of {folder}, to {path.resolve()}" if path.is_symlink() else "is a pipe, a socket or a device"
        raise UserError(
            f"{path} {what}, and only regular files inside a folder are read; remove it, or name the file itself as a "
            "source"
        )
    return paths


def stdlib_files() -> list[Path]:
    """The sources of this Python's standard library."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    # Some systems link files of their own into it.
    paths = [p for p in walk(root, leave_out=_NOT_STDLIB) if p.suffix == ".py" and not p.is_symlink()]
    if not paths:
        raise UserError(f"{STDLIB} finds no Python source under {root}; name your own text files")
    return paths


def unreadable(name: str, error: Exception) -> UserError:
    """One sentence for a file that cannot be opened or read to its end."""
    told = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return UserError(f"{name} cannot be read to its end ({told.splitlines()[0][:200]}); fix or remove it")


def _refuse_folder(error: OSError) -> None:
    raise unreadable(str(error.filename), error) from error
