"""A rank rehearsed in a process of its own, so that its memory holds nothing else.

On CPUs the process is forked, which costs no import; one with a GPU is a new program. This process never computes:
a fork would wait for threads that it does not have.
"""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.launch.forked import can_fork
from meshwright.python_process import python_command, python_variables
from meshwright.rehearse.rank import Rehearsed, Settings, rehearse_rank
from meshwright.rehearse.result import RehearsedRank

_PROGRAM = "import sys; from meshwright.rehearse.apart import answer; answer(sys.argv[1], sys.stdin.buffer.read())"


class RehearsalFailed(Exception):
    """A rank could not be rehearsed; the message says which and why."""

    def __init__(self, message: str, told: str = "") -> None:
        super().__init__(message)
        self.traceback = told


def rehearse_apart(job: Job, rank: int, alike: int, settings: Settings) -> Rehearsed:
    """Rehearse one rank in a new process and return what it measured; a user's mistake is raised here as one."""
    asked = pickle.dumps((job, rank, alike, settings))
    with tempfile.TemporaryDirectory(prefix="meshwright-rehearse-") as folder:
        file = str(Path(folder) / "answer.json")
        code = _forked(file, asked) if can_fork(job) else _started(file, asked)
        if code or not Path(file).exists():
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            hint = "; the machine may have too little memory for it" if code == -signal.SIGKILL else ""
            raise RehearsalFailed(f"the rehearsal of rank {rank} ended without a result ({how}){hint}")
        return _understood(rank, json.loads(Path(file).read_text()))


def answer(file: str, asked: bytes) -> None:
    """In the new process: rehearse, and write what came of it."""
    job, rank, alike, settings = pickle.loads(asked)
    try:
        found: dict[str, Any] = asdict(rehearse_rank(job, rank, alike, settings))
    except UserError as error:
        found = {"refused": str(error)}
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    Path(file).write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of loaders and groups are not waited for


def _understood(rank: int, found: dict[str, Any]) -> Rehearsed:
    if "refused" in found:
        raise UserError(found["refused"])
    if "failed" in found:
        raise RehearsalFailed(f"the rehearsal of rank {rank} failed: {found['failed']}", found["traceback"])
    measured, warnings = RehearsedRank.from_json(found["rank"]), tuple(found["warnings"])
    return Rehearsed(measured, found["device"], warnings, found["limited"])


def _forked(file: str, asked: bytes) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    process = multiprocessing.get_context("fork").Process(target=_answer_in_fork, args=(file, asked))
    process.start()
    process.join()
    return process.exitcode or 0


def _answer_in_fork(file: str, asked: bytes) -> None:
    # A fork has none of torch's compute threads; the first of its threads that computes replaces them, and another one
    # that computes at the same moment finds none ("Invalid thread pool!"). Replaced here, before there is another.
    torch.set_num_threads(torch.get_num_threads())
    answer(file, asked)


def _started(file: str, asked: bytes) -> int:
    variables = {**os.environ, **python_variables()}
    return subprocess.run(python_command("-c", _PROGRAM, file), input=asked, env=variables, check=False).returncode
