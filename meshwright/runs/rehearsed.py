"""Run folders that hold a rehearsal: one rank's measurements instead of a training."""

import os
from pathlib import Path

from meshwright.errors import UserError
from meshwright.reading import REHEARSAL

REHEARSED = "rehearsed"
"""The event that holds the result in one sentence, and the state that it gives."""


def is_rehearsal(run: Path) -> bool:
    """Whether a run folder holds a rehearsal."""
    return os.path.lexists(run / REHEARSAL)


def require_training(run: Path) -> None:
    """Refuse to train in a rehearsal's folder, which has no weights to continue with."""
    if is_rehearsal(run):
        raise UserError(
            f"{run} is a rehearsal, which trains nothing and saves no checkpoint; train its job with "
            f"`meshwright train {run / 'job.toml'} --set run.folder=…`"
        )
