"""Pages on a disk: whole or not at all."""

import contextlib
from pathlib import Path

from meshwright.errors import UserError


def write_whole(target: Path, text: str, option: str = "--out") -> Path:
    """Write beside, then rename: a reader never sees half a page, and a full disk leaves none."""
    draft = target.with_name(f".{target.name}.new")
    try:
        if target.exists() and not target.is_file():  # a device or a pipe is written to, never replaced
            target.write_text(text, encoding="utf-8", errors="replace")
            return target
        draft.write_text(text, encoding="utf-8", errors="replace")
        draft.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise UserError(f"{target} cannot be written ({error.strerror}); name another place with {option}") from error
    return target
