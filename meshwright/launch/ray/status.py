"""The state of a run in a Ray cluster: what its supervisor says, else what its folder says; and how it is cancelled."""

import re
import time
from pathlib import Path

from meshwright.atomic import write_atomic
from meshwright.errors import UserError
from meshwright.launch.ray.connection import NAMESPACE, answers, connect
from meshwright.launch.ray.record import OVER, State, Submission, over
from meshwright.launch.slurm.status import Status, Word
from meshwright.reading import printable
from meshwright.runs import RunFolder

STOP_FILE = "logs/stop"
"""As in `launch.worker`, which imports torch: asks the ranks to save and end."""
_POLL_S = 0.5
_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


def status_of(run: Path) -> Status:
    """The state of a run that was submitted to Ray."""
    folder, submission = RunFolder.open(run), Submission.read(run)
    assert submission is not None
    nodes = ""
    word: Word
    if (final := over(run)) is not None:
        word, why = _ended(folder, final)
    elif _is_supervised(submission):
        state = State.read(run)
        word, nodes, why = state.word, state.nodes, f"{state.why}; {_place(folder)}"
    else:
        word, why = "failed", f"its supervisor is no longer in the cluster; {_place(folder)}"
    step = max((row["step"] for row in folder.newest().rows), default=0)
    attempt = max((event.get("attempt", 0) for event in folder.events("start")), default=0)
    return Status(str(run), word, printable(why), step, folder.steps(), attempt, submission.name, nodes)


def is_active(run: Path) -> bool:
    """Whether a supervisor keeps the run going."""
    submission = Submission.read(run)
    return submission is not None and over(run) is None and _is_supervised(submission)


def require_idle(run: Path, address: str) -> None:
    """Reject a run that a supervisor keeps going, in the cluster at this address or in one that may still run."""
    submission = Submission.read(run)
    if submission is None or over(run) is not None:
        return
    if submission.address != address:  # a program is connected to one cluster only, and cannot ask another
        if answers(submission.address):
            raise UserError(
                f"{run} was submitted to the cluster at {submission.address}, which still runs, and not to the one at "
                f"{address}; run meshwright cancel {run} first"
            )
    elif _is_supervised(submission):
        raise UserError(f"{run} already runs in the cluster; wait until it ends, or run meshwright cancel {run}")


def outcome(run: Path) -> str | None:
    """What kept a run that is over from its end, in words; None if it is done or was cancelled."""
    final = over(run)
    if final is None:
        return "failed: its supervisor is no longer in the cluster"
    return final if final.startswith("failed") else None


def cancel(run: Path, wait_s: float) -> Status:
    """Let a run finish its step and save, and start no further attempt; killed if that takes too long."""
    submission = Submission.read(run)
    assert submission is not None
    if over(run) is None and _is_supervised(submission):
        write_atomic(run / OVER, "cancelled\n")
        (run / "logs").mkdir(exist_ok=True)
        write_atomic(run / STOP_FILE, "cancelled")
        deadline = time.monotonic() + wait_s
        while _is_supervised(submission):
            if time.monotonic() > deadline:
                ray = connect(submission.address)
                ray.kill(ray.get_actor(submission.name, namespace=NAMESPACE), no_restart=True)
                break
            time.sleep(_POLL_S)
    return status_of(run)


def _is_supervised(submission: Submission) -> bool:
    """Whether the run's supervisor is in the cluster; it ends with the run."""
    connect(submission.address)
    from ray.util import list_named_actors

    return {"name": submission.name, "namespace": NAMESPACE} in list_named_actors(all_namespaces=True)


def _ended(folder: RunFolder, final: str) -> tuple[Word, str]:
    name, _, why = final.partition(": ")
    if name == "done":
        return "done", "all steps are done"
    if name == "cancelled":
        return "cancelled", f"{_place(folder)}; continue with `meshwright submit {folder.path} --on ray`"
    return ("oom" if _MEMORY.search(why) else "failed"), why or "see its log"


def _place(folder: RunFolder) -> str:
    last, steps = folder.newest().last(), folder.steps()
    return f"before step 1 of {steps}" if last is None else f"step {last['step']} of {steps}"
