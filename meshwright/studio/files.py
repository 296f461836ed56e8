"""Pages on a disk: whole or not at all."""

import contextlib
from pathlib import Path

from meshwright.errors import UserError


def write_whole(target: Path, text: str, option: str = "--out", *, given: bool = True) -> Path:
    """Write beside, then rename: a reader never sees half a page, and a full disk leaves none.

    A device or a pipe that the user gave as the target is written to; one that lies in a run folder is replaced.
    """
    draft = target.with_name(f".{target.name}.new")
    try:
        if given and target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8", errors="replace")
            return target
        draft.unlink(missing_ok=True)
        # A link under this name, which a stranger's folder may hold, would have us write somewhere else.
        with draft.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        draft.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise UserError(f"{target} cannot be written ({error.strerror}); name another place with {option}") from error
    return target
