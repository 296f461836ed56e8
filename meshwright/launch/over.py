"""How a run's submission ended: one word in a file, which its jobs and attempts look at before they start."""

from pathlib import Path

from meshwright.errors import UserError
from meshwright.reading import Unfit, read_text

_LONGEST = 4096


def read_over(path: Path) -> str | None:
    """Why nothing further should start; None if it may."""
    try:
        return read_text(path, _LONGEST).strip() or None
    except FileNotFoundError:
        return None
    except Unfit as unfit:
        raise UserError(f"{path} is damaged ({unfit}); remove it") from None
