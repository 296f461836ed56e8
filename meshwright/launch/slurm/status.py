"""A run's state in one word, and why: what Slurm reports about its jobs, else what its folder says."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from meshwright.errors import UserError
from meshwright.launch.slurm.commands import NoAnswer, SlurmJob, job_state
from meshwright.launch.slurm.record import FOLDER, REHEARSE, Submission, over, trial_verdict
from meshwright.reading import printable
from meshwright.runs import RunFolder
from meshwright.runs.rehearsed import REHEARSED, is_rehearsal

Word = Literal[
    "pending", "running", "requeued", "done", "stopped", "cancelled", "failed", "oom", "timeout", "rehearsed", "damaged"
]
_MEMORY = re.compile(r"(?<!may have run )out of memory|outofmemory|\boom\b", re.IGNORECASE)


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
    """What the state is about: a Slurm job's id, or the name of a supervisor in Ray."""
    nodes: str


def status_of(path: Path) -> Status:
    """The state of the run in a folder."""
    folder = RunFolder.open(path)
    submission = Submission.read(path)
    try:
        job = _job_of(submission) if submission is not None else None
    except NoAnswer:
        if over(path) is None and folder.state() != "done":
            raise
        job = None  # how it ended is known without Slurm
    word, why = _state(folder, submission, job)
    step = max((row["step"] for row in folder.newest().rows), default=0)
    attempt = max((event.get("attempt", 0) for event in folder.events("start")), default=0)
    unread = [report for tally in folder.unread.values() if (report := tally.sentence())]
    nodes = job.nodes if job and job.active else ""
    why = printable("; ".join([why, *unread]))
    return Status(str(path), word, why, step, folder.steps(), attempt, job.id if job else None, nodes)


def statuses(parent: Path, state: Callable[[Path], Status] = status_of) -> list[Status]:
    """The state of every run in a folder, newest first; `state` finds that of one."""
    if not parent.is_dir():
        raise UserError(f"{parent} is not a folder of runs; give --all the folder that contains them")
    found = [path.parent for path in parent.glob("*/job.resolved.json")]
    return [_report(path, state) for path in sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True)]


def _report(path: Path, state: Callable[[Path], Status]) -> Status:
    """The state of one run among others; an error must not stop the list."""
    try:
        return state(path)
    except NoAnswer:
        raise
    except UserError as error:
        return Status(str(path), "damaged", printable(str(error)), 0, 0, 0, None, "")


def active_job(path: Path) -> SlurmJob | None:
    """The pending or running job of a run."""
    submission = Submission.read(path)
    job = _job_of(submission) if submission is not None else None
    return job if job is not None and job.active else None


def _job_of(submission: Submission) -> SlurmJob | None:
    """The running job, else the first pending one, else the last that Slurm remembers."""
    known = [job for job in map(job_state, (*submission.ladder, *submission.jobs)) if job is not None]
    active = [job for job in known if job.active]
    return next((job for job in active if not job.waits), active[0] if active else known[-1] if known else None)


def _state(folder: RunFolder, submission: Submission | None, job: SlurmJob | None) -> tuple[Word, str]:
    if is_rehearsal(folder.path):
        return "rehearsed", _rehearsed(folder)
    if job is not None and submission is not None and job.active:
        return _active(folder, submission, job)
    stop = next(reversed(folder.events("stop")), None)
    reason = None if stop is None or folder.state() == "running" else stop.get("reason")
    error = str(stop.get("error") or "") if stop is not None and reason is not None else ""
    final = over(folder.path)
    if reason == "finished" or final == "done":
        return "done", "all steps are done"
    if final == "cancelled":
        return "cancelled", _place(folder)
    if submission is not None and (no := _trials_no(folder.path, submission)):
        return "failed", no
    if job is not None and job.state == "CANCELLED" and final is None:
        return "cancelled", f"Slurm reports {job.state}; {_place(folder)}"
    if (job is not None and job.state == "OUT_OF_MEMORY") or _MEMORY.search(error):
        return "oom", error or "the machine ran out of memory"
    if job is not None and job.state == "TIMEOUT":
        return "timeout", f"Slurm ended it at its time limit; {_place(folder)}"
    if reason == "failed" or (final or "").startswith("failed"):
        return "failed", error or _words(final) or "see its log"
    if reason == "interrupted":
        return _stopped(folder, submission, error)
    if submission is None:
        return "running", "or its process was killed"
    if job is None:
        return "failed", "Slurm has forgotten its jobs, and none of them ended normally"
    return "failed", f"Slurm reports {job.state}; {_place(folder)}"


def _rehearsed(folder: RunFolder) -> str:
    events = folder.events(REHEARSED)
    return str(events[-1].get("result")) if events else f"see meshwright report {folder.path}"


def _active(folder: RunFolder, submission: Submission, job: SlurmJob) -> tuple[Word, str]:
    trial = f"{_rung(folder.path, submission.ladder.index(job.id))}, " if job.id in submission.ladder else ""
    if not job.waits:
        return "running", f"{trial}{_place(folder)}"
    again = job.restarts or folder.events("start")
    return ("requeued" if again else "pending"), f"{trial}{job.reason or 'no reason given by Slurm yet'}" + (
        f"; {_place(folder)}" if again else ""
    )


def _stopped(folder: RunFolder, submission: Submission | None, error: str) -> tuple[Word, str]:
    if submission is None:
        why = f"{error}; {_place(folder)}" if error else _place(folder)
        return "stopped", f"{why}; continue with `meshwright train {folder.path} --resume`"
    why = error or "its last job saved and exited"
    return "timeout", f"{why}; continue with `meshwright submit {folder.path} --site …`; {_place(folder)}"


def _place(folder: RunFolder) -> str:
    last, steps = folder.newest().last(), folder.steps()
    if last is None:
        return f"before step 1 of {steps}"
    return f"step {last['step']} of {steps}" + ("" if last["loss"] is None else f", loss {last['loss']:.4f}")


def _trials_no(run: Path, submission: Submission) -> str | None:
    """What a trial reported, or how it failed, if that kept the run from starting."""
    trials = sorted((path for path in run.glob("ladder/*") if path.name.isdecimal()), key=lambda path: int(path.name))
    rehearsal = [run / REHEARSE] if (run / REHEARSE).is_dir() else []
    for trial, job in zip([*rehearsal, *trials], submission.ladder, strict=False):
        name = f"trial on {trial.name}" if trial.name.isdecimal() else "rehearsal"
        report = trial_verdict(trial)
        if report is not None and not report["go"]:
            return f"no-go from the {name}: {report['why']}"
        if report is not None or (final := over(trial)) == "cancelled":
            continue
        known = job_state(job)
        if final or (known is not None and not known.active and known.state not in ("COMPLETED", "CANCELLED")):
            if trial in rehearsal:
                return f"the rehearsal failed, see {trial / FOLDER}"
            word, why = _state(RunFolder.open(trial), replace(submission, ladder=()), known)
            return f"the {name} ended with {word}: {why}"
    return None


def _rung(run: Path, place: int) -> str:
    """What the ladder's jobs are called, in their order."""
    rehearsed = (run / REHEARSE).is_dir()
    return "rehearsal" if rehearsed and place == 0 else f"trial {place + 1 - rehearsed}"


def _words(final: str | None) -> str:
    return (final or "").partition(": ")[2]
