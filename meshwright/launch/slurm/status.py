"""A run's state in one word, and why: what Slurm says of its jobs, else what its folder says."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.errors import UserError
from meshwright.launch.folder import RunFolder
from meshwright.launch.slurm.commands import SlurmJob, job_state
from meshwright.launch.slurm.record import Submission, over

Word = Literal["pending", "running", "requeued", "done", "stopped", "cancelled", "failed", "oom", "timeout"]
_MEMORY = ("out of memory", "outofmemory", "oom")


@dataclass(frozen=True)
class Status:
    """One run's state."""

    run: str
    state: Word
    why: str
    step: int
    steps: int
    attempt: int
    job: str | None
    """Slurm's number of the job the state is about."""
    nodes: str


def status_of(path: Path) -> Status:
    """The state of the run in a folder."""
    folder = RunFolder.open(path)
    submission = Submission.read(path)
    job = _job_of(submission) if submission is not None else None
    word, why = _state(folder, submission, job)
    rows = folder.metrics()
    step = max((row["step"] for row in rows), default=0)
    attempt = max((event.get("attempt", 0) for event in folder.events() if event["kind"] == "start"), default=0)
    steps = int(folder.job()["run"]["steps"])
    return Status(
        str(path), word, why, step, steps, attempt, job.id if job else None, job.nodes if job and job.active else ""
    )


def statuses(parent: Path) -> list[Status]:
    """The state of every run in a folder, newest first."""
    if not parent.is_dir():
        raise UserError(f"{parent} is no folder of runs; give --all the folder they are in")
    found = [path.parent for path in parent.glob("*/job.resolved.json")]
    return [status_of(path) for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


def active_job(path: Path) -> SlurmJob | None:
    """The job of a run that waits or runs."""
    submission = Submission.read(path)
    job = _job_of(submission) if submission is not None else None
    return job if job is not None and job.active else None


def _job_of(submission: Submission) -> SlurmJob | None:
    """The job that runs, else the first that waits, else the last that Slurm remembers."""
    known = [job for job in map(job_state, (*submission.ladder, *submission.jobs)) if job is not None]
    active = [job for job in known if job.active]
    return next((job for job in active if not job.waits), active[0] if active else known[-1] if known else None)


def _state(folder: RunFolder, submission: Submission | None, job: SlurmJob | None) -> tuple[Word, str]:
    if job is not None and submission is not None and job.active:
        return _active(folder, submission, job)
    stop = next((event for event in reversed(folder.events()) if event["kind"] == "stop"), None)
    reason = None if stop is None or folder.state() == "running" else stop.get("reason")
    error = str((stop or {}).get("error") or "")
    final = over(folder.path)
    if reason == "finished" or final == "done":
        return "done", "all steps are made"
    if final == "cancelled":
        return "cancelled", _place(folder)
    if (job is not None and job.state == "OUT_OF_MEMORY") or any(word in error.lower() for word in _MEMORY):
        return "oom", error or "the machine's memory ran out"
    if job is not None and job.state == "TIMEOUT":
        return "timeout", f"Slurm ended it at its time limit; {_place(folder)}"
    if reason == "failed" or (final or "").startswith("failed"):
        return "failed", error or _words(final) or "see its log"
    if reason == "interrupted":
        return _stopped(folder, submission)
    if submission is None:
        return "running", "or its process was killed outright"
    if job is None:
        return "failed", "Slurm has forgotten its jobs, and none of them ended in good order"
    if no := _trials_no(folder.path):
        return "failed", no
    return ("cancelled" if job.state == "CANCELLED" else "failed"), f"Slurm says {job.state}; {_place(folder)}"


def _active(folder: RunFolder, submission: Submission, job: SlurmJob) -> tuple[Word, str]:
    trial = f"trial {submission.ladder.index(job.id) + 1}, " if job.id in submission.ladder else ""
    if not job.waits:
        return "running", f"{trial}{_place(folder)}"
    again = job.restarts or any(event["kind"] == "start" for event in folder.events())
    return ("requeued" if again else "pending"), f"{trial}{job.reason or job.state}" + (
        f"; {_place(folder)}" if again else ""
    )


def _stopped(folder: RunFolder, submission: Submission | None) -> tuple[Word, str]:
    if submission is None:
        return "stopped", f"{_place(folder)}; `meshwright train {folder.path} --resume` goes on"
    return (
        "timeout",
        f"its last job saved and ended; `meshwright submit {folder.path} --site …` goes on; {_place(folder)}",
    )


def _place(folder: RunFolder) -> str:
    rows = [row for row in folder.metrics() if "loss" in row]
    steps = folder.job()["run"]["steps"]
    return f"step {rows[-1]['step']} of {steps}, loss {rows[-1]['loss']:.4f}" if rows else f"before step 1 of {steps}"


def _trials_no(run: Path) -> str | None:
    """What a trial said that let the run not start."""
    for path in sorted(run.glob("ladder/*/slurm/verdict.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        if not told["go"]:
            return f"the trial on {path.parts[-3]} says no-go: {told['why']}"
    return None


def _words(final: str | None) -> str:
    return (final or "").partition(": ")[2]
