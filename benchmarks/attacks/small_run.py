"""A real finished run, trained once per process, for families that damage copies of it."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

STEPS, RESUMED_FROM = 6, 4
JOB = Path(__file__).parents[2] / "tests" / "small.toml"
SET = ["model.vocab_size=512", "evaluation.every_steps=3", "evaluation.batches=1", "checkpoint.every_steps=2"]
SET += ["checkpoint.keep_last=3", f"run.steps={STEPS}"]


@cache
def finished_run() -> Path:
    """The folder of a run of six steps with three checkpoints; nobody writes into it."""
    from attacks.case import command

    place = Path(tempfile.mkdtemp(prefix="attack-run-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(place, ignore_errors=True))
    if (process := os.fork()) == 0:  # training starts threads, which a process that forks cases must not have
        code = 1
        try:
            os.chdir(place)
            os.environ["XDG_CACHE_HOME"] = str(place / ".cache")
            command("train", str(JOB), *(word for one in SET for word in ("--set", one)))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    if status:
        raise RuntimeError(f"the small run to be damaged could not be created (status {status})")
    run = place / "run"
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "rank-0.err").write_text("warming up\n" * 20)
    return run


def copy_run(into: Path, checkpoints: bool = False) -> Path:
    """A copy of the run, with its checkpoints only where they are needed."""
    left_out = () if checkpoints else ("checkpoints",)
    shutil.copytree(finished_run(), into, ignore=shutil.ignore_patterns(*left_out), symlinks=True)
    return into
