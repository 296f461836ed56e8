"""`meshwright.ray.train`: a job trained on the machines of a Ray cluster, from a program that is connected to it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from meshwright.api.jobs import JobLike, loaded
from meshwright.api.launching import require_installed
from meshwright.api.runs import Run
from meshwright.errors import UserError

_LOOK_S = 0.5


def train(
    job: JobLike,
    *,
    dataset: Any = None,
    address: str | None = None,
    min_ranks: int | None = None,
    ship: bool = False,
    wait: bool = True,
) -> Run:
    """Train a job on a Ray cluster as `meshwright submit --on ray` does, and return its run once it has ended.

    A program that is connected to a cluster uses that one; `address` connects another. A run folder as job is
    continued. A `dataset` of Ray Data is the run's data in place of data.sources: its rows are written once to the run
    folder, and one whose rows or order differ from one reading to the next is rejected. Without `wait` the run goes on
    while the program does something else, or has ended.
    """
    from meshwright.launch.ray import is_active, outcome
    from meshwright.launch.ray_submit import full_layout, submit

    source = str(job) if isinstance(job, str | Path) else ""
    changes = full_layout(source) if source else {}
    given = loaded(job, changes)
    require_installed(given.job)
    asked = submit(source, given, address, min_ranks, ship, changes, lambda text: None, dataset)
    run = Path(asked.run)
    while wait and is_active(run):
        time.sleep(_LOOK_S)
    if wait and (error := outcome(run)) is not None:
        raise UserError(f"{run} {error}")
    return Run(run)
