"""What a run folder keeps of its submission: `slurm/` with the script, the job ids, and a word once all is over."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from meshwright.errors import UserError

_ID = re.compile(r"[0-9]+(_[0-9]+)?")
FOLDER = "slurm"
OVER = "slurm/over"
"""Holds one word once no further job should run: done, cancelled, failed."""


@dataclass(frozen=True)
class Submission:
    """A run's jobs, in the order they run."""

    site: str
    jobs: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    chain: int
    time: str
    ladder: tuple[str, ...] = ()
    """Jobs of the trials before the run, smallest first."""

    def write(self, run: Path) -> None:
        """Keep it in the run folder."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        draft = run / FOLDER / ".submission.json.new"
        draft.write_text(text, encoding="utf-8")
        draft.rename(run / FOLDER / "submission.json")

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """The last submission of a run; None where it never was one."""
        path = run / FOLDER / "submission.json"
        if not path.is_file():
            return None
        try:
            fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            read = cls(**{**fields, "jobs": tuple(fields["jobs"]), "ladder": tuple(fields["ladder"])})
            sound = all(isinstance(job, str) and _ID.fullmatch(job) for job in (*read.jobs, *read.ladder))
        except (ValueError, TypeError, KeyError, RecursionError):
            sound = False
        if not sound:  # an id becomes a word of scancel, to which "--user" is one too
            raise UserError(f"{path} is damaged: it names no jobs of Slurm; restore it from a copy or delete it")
        return read


def over(run: Path) -> str | None:
    """Why no further job should run; None while one may."""
    path = run / OVER
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None
