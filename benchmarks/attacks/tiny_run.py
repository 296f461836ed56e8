"""A training run of a second: run in this process, and compared bit for bit with the same run undisturbed."""

import functools
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from attacks.case import InternalError, LostSteps

STEPS = 20
JOB = str(Path(__file__).parents[2] / "tests" / "small.toml")
SET = ["model.vocab_size=64", "model.width=16", "model.heads=2", "model.kv_heads=1", "model.ffn_width=32"]
SET += ["model.max_sequence_length=32", "batch.sequence_length=8", "batch.global_batch=2", "checkpoint.every_steps=5"]
SET += [f"run.steps={STEPS}"]
Numbers = tuple[list[tuple[str, ...]], dict[str, str]]


def train(resume: bool = False) -> None:
    """The tiny job in the working directory, from the start or resumed; in its own process."""
    from meshwright.job import load_job
    from meshwright.launch.worker import run_job
    from meshwright.runs import folder

    packages, code = described()
    folder.describe_packages, folder.describe_code = lambda: packages, lambda: code
    run_job(load_job(JOB, SET), Console(quiet=True), resume=resume)


def finished() -> bool:
    """Whether the run in the working directory completed all its steps and recorded it."""
    from meshwright.runs import RunFolder

    return Path("run").exists() and RunFolder.open(Path("run")).state() == "done"


def numbers(run: Path) -> Numbers:
    """All that must be equal: every step's numbers to the last bit, and the hash of the last state."""
    from meshwright.checkpoint import newest
    from meshwright.runs import RunFolder

    names = ("step", "loss", "grad_norm", "lr", "tokens")
    rows = [tuple(repr(row.get(name)) for name in names) for row in RunFolder.open(run).metrics()]
    last = newest(run)
    last.verify()
    hashes = {name: record.sha256 for name, record in last.manifest.files.items() if name.endswith(".safetensors")}
    return rows, hashes


@functools.cache
def described() -> tuple[Any, Any]:
    """The packages and the code, the same in every run: determined once, in the process all are forked from."""
    from meshwright.runs import folder

    return folder.describe_packages(), folder.describe_code()


@functools.cache
def left_alone() -> Numbers:
    """The numbers of an undisturbed run."""
    described()  # before the first fork
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        where = Path(name)

        def run() -> None:
            os.chdir(where)
            train()
            (where / "numbers").write_bytes(pickle.dumps(numbers(Path("run"))))

        if why := in_child(run)[1]:
            raise InternalError(why)
        found: Numbers = pickle.loads((where / "numbers").read_bytes())
    return found


def in_child(work: Callable[[], Any], meanwhile: Callable[[int], None] = lambda process: None) -> tuple[int, str]:
    """Call a function in a forked process, so that this one never has torch's threads or is killed; its status and
    error.

    `meanwhile` is called with the process's id.
    """
    with tempfile.TemporaryFile() as said:
        process = os.fork()
        if process == 0:
            # As in a process a user starts: another package (Ray) may have left its own handler in the parent.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            code = 0
            try:
                work()
            except BaseException:
                os.write(said.fileno(), traceback.format_exc()[-3000:].encode())
                code = 1
            os._exit(code)
        meanwhile(process)
        _, status = os.waitpid(process, 0)
        said.seek(0)
        return status, said.read().decode()


def require_equal(run: Path) -> None:
    """Raise LostSteps if a run ended differently from the undisturbed one."""
    from meshwright.runs import RunFolder

    (rows, hashes), (expected, wanted) = numbers(run), left_alone()
    for row, other in zip(rows, expected, strict=False):
        if row != other:
            raise LostSteps(f"{row} instead of {other}")
    if len(rows) != len(expected):
        raise LostSteps(f"{len(rows)} rows instead of {len(expected)}")
    if hashes != wanted:
        raise LostSteps(f"the last state differs: {[name for name in wanted if hashes.get(name) != wanted[name]]}")
    if (state := RunFolder.open(run).state()) != "done":
        raise LostSteps(f"a finished run has state {state}")
