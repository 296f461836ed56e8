"""Cancel a run: save its state, and start no further job."""

import time
from pathlib import Path

from meshwright.errors import UserError
from meshwright.launch.slurm.commands import NoAnswer, SlurmJob, job_state, scancel
from meshwright.launch.slurm.record import OVER, Submission
from meshwright.launch.slurm.status import Status, status_of
from meshwright.runs import RunFolder

_POLL_S = 0.5


def cancel(run: Path, wait_s: float) -> Status:
    """Prevent further jobs of a run, and let the running one save and exit; killed outright if that takes too long."""
    RunFolder.open(run)
    submission = Submission.read(run)
    if submission is None:
        raise UserError(f"{run} was not submitted to Slurm or Ray; stop a local run with Ctrl-C")
    jobs = [job for job in map(job_state, (*submission.ladder, *submission.jobs)) if job is not None and job.active]
    if not jobs:
        return status_of(run)
    (run / OVER).write_text("cancelled\n", encoding="utf-8")
    for job in jobs:
        if job.waits:
            scancel(job.id)
        else:
            scancel(job.id, "--batch", "--signal=TERM")  # only to the script, which lets the ranks save
    deadline = time.monotonic() + wait_s
    while left := _still_active(jobs, patient=time.monotonic() < deadline):
        if time.monotonic() > deadline:
            for job in left:
                scancel(job.id)
            break
        time.sleep(_POLL_S)
    return status_of(run)


def _still_active(jobs: list[SlurmJob], patient: bool) -> list[SlurmJob]:
    """Jobs that wait or run; while Slurm is down, for as long as we wait, all of them."""
    try:
        return [job for job in map(job_state, (job.id for job in jobs)) if job is not None and job.active]
    except NoAnswer:
        if not patient:
            raise
        return jobs
