"""What a run folder keeps of its submission: `slurm/` with the script, the job ids, and how it all ended."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from meshwright.atomic import write_atomic
from meshwright.errors import UserError
from meshwright.launch.over import read_over
from meshwright.reading import Unfit, is_number, read_object, read_plain

FOLDER = "slurm"
OVER = "slurm/over"
"""Contains one word once no further job should run: done, cancelled, failed."""
REHEARSE = "ladder/rehearse"
"""The folder of a ladder's first job, which rehearses the run."""
REHEARSED = f"{REHEARSE}/rehearsal"
"""What it found."""
_JOB = re.compile(r"\d[\w,%\[\].-]{0,63}")


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
    """Jobs of the trials that precede the run, smallest first."""

    def write(self, run: Path) -> None:
        """Write it to the run folder."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        write_atomic(run / FOLDER / "submission.json", text)

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """The last submission of a run; None if there was none."""
        path = run / FOLDER / "submission.json"
        try:
            found = TypeAdapter(cls).validate_json(read_plain(path))
            if not all(_JOB.fullmatch(job) for job in (*found.jobs, *found.ladder)):
                raise Unfit("one of its job ids is not a number")  # and could be an option of Slurm's commands
            return found
        except FileNotFoundError:
            return None
        except (Unfit, ValidationError) as error:
            why = str(error) if isinstance(error, Unfit) else error.errors()[0]["msg"]
            raise UserError(f"{path} is damaged ({why}); restore it, or submit the run again") from None


def over(run: Path) -> str | None:
    """Why no further job should run; None if one may."""
    return read_over(run / OVER)


def trial_verdict(trial: Path) -> dict[str, Any] | None:
    """The verdict of a ladder's trial, or of its rehearsal: whether to `go` and `why`; None before there is one."""
    path = trial / FOLDER / "verdict.json"
    try:
        report = read_object(path)
        if not isinstance(report.get("go"), bool) or not isinstance(report.get("why"), str):
            raise Unfit("it lacks go or why")
        if report["go"] and trial.name.isdecimal() and not is_number(report.get("tokens_per_s_per_gpu")):
            raise Unfit("it has no speed")
    except FileNotFoundError:
        return None
    except Unfit as unfit:
        raise UserError(f"{path} is damaged ({unfit}); remove {trial} and submit the ladder again") from None
    return report
