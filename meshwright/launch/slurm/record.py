"""What a run folder keeps of its submission: `slurm/` with the script, the job ids, and a word once all is over."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

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
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "jobs": tuple(fields["jobs"]), "ladder": tuple(fields["ladder"])})


def over(run: Path) -> str | None:
    """Why no further job should run; None while one may."""
    path = run / OVER
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None
