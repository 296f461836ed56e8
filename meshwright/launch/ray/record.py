"""What a run folder keeps of its submission to Ray: `ray/` with the request, the logs, and how it all ended."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError

from meshwright.atomic import write_atomic
from meshwright.errors import UserError
from meshwright.launch.over import read_over
from meshwright.reading import Unfit, read_plain

FOLDER = "ray"
OVER = "ray/over"
"""Contains one word once no further attempt should start: done, cancelled, failed."""
STATE = "ray/state.json"


@dataclass(frozen=True)
class Submission:
    """What a supervisor is asked to run, and where."""

    address: str
    """HOST:PORT of the cluster."""
    run: str
    folder: str
    """The folder it was submitted from, which relative paths of the job start at."""
    min_ranks: int
    gpus: bool
    """Whether a rank takes a GPU, else a CPU."""
    version: str
    """Meshwright's, which every machine must have."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values by section.field over the run folder's job: the layout as submitted, while the folder's is that of the
    last attempt, and what a continued run changes."""
    trust: bool = False
    device: str | None = None
    """What a rank's device is to the planner; None if that is not known."""

    @property
    def name(self) -> str:
        """The name of the run's supervisor in the cluster."""
        return f"run:{self.run}"

    def write(self) -> None:
        """Write it to the run folder."""
        write_atomic(Path(self.run) / FOLDER / "submission.json", json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """The last submission of a run; None if there was none."""
        path = run / FOLDER / "submission.json"
        try:
            return TypeAdapter(cls).validate_json(read_plain(path))
        except FileNotFoundError:
            return None
        except (Unfit, ValidationError) as error:
            why = str(error) if isinstance(error, Unfit) else error.errors()[0]["msg"]
            raise UserError(f"{path} is damaged ({why}); restore it, or submit the run again") from None


@dataclass(frozen=True)
class State:
    """What a supervisor says of its run, as long as it is not over."""

    word: Literal["pending", "running", "requeued"] = "pending"
    why: str = "starting"
    nodes: str = ""

    def write(self, run: Path) -> None:
        """Write it to the run folder; asking the supervisor itself would take whoever asks seconds longer."""
        write_atomic(run / STATE, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, run: Path) -> Self:
        """What was last written; before that, that it starts."""
        try:
            return TypeAdapter(cls).validate_json(read_plain(run / STATE))
        except (FileNotFoundError, Unfit, ValidationError):
            return cls()


def over(run: Path) -> str | None:
    """Why no further attempt should start; None if one may."""
    return read_over(run / OVER)
