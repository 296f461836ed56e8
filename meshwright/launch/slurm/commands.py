"""Call Slurm's own commands and parse their output; their errors become one sentence."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import UserError

_ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STAGE_OUT", "SIGNALING"}
_FIELD = re.compile(r"(\w[\w:/]*)=(\S*)")
_TIMEOUT_S = 60


@dataclass(frozen=True)
class SlurmJob:
    """What Slurm reports about a job."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    exit_code: str = ""

    @property
    def active(self) -> bool:
        """Whether it is pending or running."""
        return self.state in _ACTIVE

    @property
    def waits(self) -> bool:
        """Whether it has yet to start or restart."""
        return self.state in ("PENDING", "REQUEUED", "CONFIGURING")


class NoAnswer(UserError):
    """Slurm could not be asked; the state of a job is then unknown, which is not the same as gone."""


def sbatch(script: Path, options: Sequence[str], arguments: Sequence[str] = ()) -> str:
    """Submit a script; returns the job's id."""
    out = _call(["sbatch", "--parsable", *options, str(script), *arguments])
    return out.strip().splitlines()[-1].partition(";")[0]


def test_only(script: Path) -> None:
    """Let Slurm check a script and say when it would start; raises what it rejects."""
    _call(["sbatch", "--test-only", str(script)])


def scancel(job: str, *options: str) -> None:
    """Cancel a job, or signal it; ignores a job that is already gone."""
    _run(["scancel", *options, job])


def job_state(job: str) -> SlurmJob | None:
    """What the controller still knows about a job, else the accounting; None if both have forgotten it."""
    shown = _run(["scontrol", "show", "job", "-o", job])
    if shown.returncode and "Invalid job id" not in shown.stderr:
        raise NoAnswer(
            f"Slurm does not report the state of job {job} ({_report(shown)}); retry once scontrol ping succeeds"
        )
    if shown.returncode == 0 and shown.stdout.strip():
        fields = dict(_FIELD.findall(shown.stdout.splitlines()[0]))
        return SlurmJob(
            job,
            fields.get("JobState", ""),
            "" if fields.get("Reason") == "None" else fields.get("Reason", ""),
            fields.get("NodeList", "").replace("(null)", ""),
            int(fields.get("Restarts", "0") or 0),
            fields.get("ExitCode", ""),
        )
    lines = _accounted(job)
    if not lines:
        return None
    state, code, nodes = [*lines[-1].split("|"), "", ""][:3]
    return SlurmJob(job, state.partition(" ")[0], nodes=nodes, exit_code=code)


def _accounted(job: str) -> list[str]:
    """The job according to the accounting; None on a site without one."""
    try:
        report = _run(["sacct", "-j", job, "-X", "-n", "-P", "-o", "State,ExitCode,NodeList"])
    except NoAnswer:
        return []
    return report.stdout.strip().splitlines() if report.returncode == 0 else []


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        remedy = ", or add --dry-run" if command[0] == "sbatch" else ""
        raise NoAnswer(f"{command[0]} is not on this machine; run this on a login node of the site{remedy}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {_TIMEOUT_S} s; check Slurm with sinfo") from None


def _call(command: list[str]) -> str:
    done = _run(command)
    if done.returncode:
        raise UserError(f"{command[0]} failed: {_report(done)}; fix what it names")
    return done.stdout


def _report(done: "subprocess.CompletedProcess[str]") -> str:
    """A command's error message, in one line."""
    lines = [line.removeprefix(f"{done.args[0]}: ").strip() for line in done.stderr.splitlines()]
    return " ".join(line for line in lines if line) or f"exit code {done.returncode}"
