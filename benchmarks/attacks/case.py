"""One hostile case, run in its own process with limits on time and memory, and its outcome."""

import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MEMORY_GIB = 2.0
SECONDS = 20.0


@dataclass(frozen=True)
class Case:
    """What is tried: `run` gets an empty folder, and raises `UserError` or `Refused` where the input is refused."""

    name: str
    run: Callable[[Path], None]
    seconds: float = SECONDS
    memory_gib: float = MEMORY_GIB  # the most the case may take beyond what the process already held


@dataclass(frozen=True)
class Family:
    """An endless stream of cases of one kind, drawn from a seed; `weight` is its share among the families."""

    name: str
    draw: Callable[[random.Random], Iterator[Case]]
    weight: float = 1.0
    unavailable: Callable[[], str | None] = lambda: None
    """Why it cannot run on this machine; None if it can."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: refused, survived, internal error, hang, memory, lost steps or not run; and why."""

    case: str
    verdict: str
    why: str = ""
    seconds: float = 0.0


class Refused(Exception):
    """The input was refused with one of our messages."""


class LostSteps(Exception):
    """A run ended differently from the same run without interference."""


class InternalError(Exception):
    """A command printed "internal error" or a traceback, or ended with an undocumented exit code."""


def command(*arguments: str, accept: tuple[int, ...] = (0, 1, 85)) -> str:
    """Run `meshwright ARGUMENTS` in this process; its output, or the exception that says how it ended."""
    from meshwright.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    before = sys.argv
    sys.argv = ["meshwright", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    finally:
        sys.argv = before
    said = err.getvalue()
    if "can get no more memory" in said:
        raise MemoryError(said)
    if "internal error" in said or "Traceback" in said or (code not in accept and code != 2):
        raise InternalError(f"exit {code}: {said[-2000:]}")
    if code == 2:
        raise Refused(said.strip())
    return out.getvalue()


def run_cases(cases: list[Case], processes: int = 1) -> list[Outcome]:
    """Run cases in order, in several processes at once; their outcomes in the cases' order."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        # Processes and not threads: a fork of a process with threads may find a lock held forever.
        workers = []
        for first in range(processes):
            if (worker := os.fork()) == 0:
                done = [asdict(run_case(case)) for case in cases[first::processes]]
                Path(name, str(first)).write_text(json.dumps(done))
                os._exit(0)
            workers.append(worker)
        for worker in workers:
            os.waitpid(worker, 0)
        shares = [json.loads(Path(name, str(first)).read_text()) for first in range(processes)]
    return [Outcome(**shares[index % processes][index // processes]) for index in range(len(cases))]


def run_case(case: Case) -> Outcome:
    """Run a case in its own forked process and folder."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attack-") as name, tempfile.TemporaryFile() as said:
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            os._exit(_inside(case, Path(name), said.fileno()))
        status = _wait(process, case.seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)  # what the case started and left behind
        said.seek(0)
        why = said.read(4000).decode("utf-8", "replace")
    seconds = time.monotonic() - began
    if status is None:
        return Outcome(case.name, "hang", f"still running after {case.seconds:.0f} s", seconds)
    if os.WIFSIGNALED(status):
        return Outcome(case.name, "internal error", f"killed by signal {os.WTERMSIG(status)} {why}", seconds)
    return Outcome(case.name, VERDICTS.get(os.WEXITSTATUS(status), "internal error"), why, seconds)


VERDICTS = {0: "survived", 2: "refused", 3: "internal error", 4: "memory", 5: "lost steps"}


def _inside(case: Case, folder: Path, said: int) -> int:
    """The forked process: its exit code gives the outcome of the case."""
    from meshwright.errors import UserError

    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / ".cache")
    before = _peak_gib()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # A multiple of the limit, so that excess is measured and reported, and the machine survives it.
    resource.setrlimit(resource.RLIMIT_DATA, (int((before + 2 * case.memory_gib + 1) * 2**30), hard))
    code, why = 0, ""
    try:
        case.run(folder)
    except (UserError, Refused) as error:
        code, why = 2, str(error)
        if not why.strip():
            code, why = 3, "refused without a message"
    except LostSteps as error:
        code, why = 5, str(error)
    except MemoryError:
        code, why = 4, traceback.format_exc()
    except BaseException:
        code, why = 3, traceback.format_exc()
    took = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 2**20
    if took > case.memory_gib:
        code, why = 4, f"took {took:.1f} GiB, {case.memory_gib} GiB allowed"
    os.write(said, why[-4000:].encode("utf-8", "replace"))
    return code


def _peak_gib() -> float:
    """Private memory this process holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) / 2**20
    return 0.0


def _wait(process: int, seconds: float) -> int | None:
    until, pause = time.monotonic() + seconds, 0.001
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > until:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
