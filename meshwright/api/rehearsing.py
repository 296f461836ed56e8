"""`meshwright.rehearse`: one rank of a cluster's job at full size on the one device that is here."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

from meshwright.api.jobs import JobLike, load_job
from meshwright.api.launching import require_installed

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.rehearse import Rehearsal


def rehearse(
    job: JobLike,
    *,
    cluster: str | None = None,
    rank: int | None = None,
    each_stage: bool = False,
    steps: int = 3,
    warmup: int = 2,
    profile: bool = False,
    checkpoint: bool = True,
    report: Callable[[str], None] = lambda sentence: None,
) -> Rehearsal:
    """Run one rank of the job's world here, or with `each_stage` one of each kind, with the others' messages replaced.

    Without a rank it is the one that the plan says is fullest. Without `checkpoint` none is written. `report` is called
    with what is about to run.
    """
    from meshwright.launch.forked import can_fork, no_forks
    from meshwright.rehearse.run import rehearse as run

    given = load_job(job)
    asked = {"cluster": cluster, "rank": rank, "each_stage": each_stage, "steps": steps, "warmup": warmup}
    # Only a process without threads to compute with can be forked at any time.
    with nullcontext() if os.environ.get("OMP_NUM_THREADS") == "1" else no_forks():
        if not can_fork(given):
            require_installed(given)
        return run(given, **asked, profile=profile, checkpoint=checkpoint, report=report)  # type: ignore[arg-type]
