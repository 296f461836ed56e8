"""Pages on disk, written atomically."""

from pathlib import Path

from meshwright.atomic import write_atomic
from meshwright.errors import UserError


def write_page(target: Path, text: str, option: str = "--out", *, given: bool = True) -> Path:
    """Write a page atomically: readers never see part of it, and a full disk leaves nothing behind.

    A device or a pipe that the user gave as the target is written to; one found in a run folder is replaced.
    """
    raw = text.encode("utf-8", "replace")
    try:
        if given and target.exists() and not target.is_file():
            target.write_bytes(raw)
        else:
            write_atomic(target, raw)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); choose another path with {option}") from error
    return target
