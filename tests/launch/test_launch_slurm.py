"""Runs on a real Slurm that this file starts: signalled, requeued, moved off a lost node, chained, cancelled."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from slurm_cluster import Cluster, missing, told

from meshwright.checkpoint import newest
from meshwright.cli import main
from meshwright.hardware import known_sites
from meshwright.job import load_job
from meshwright.launch.local import run_local
from meshwright.launch.ranks import find_place
from meshwright.launch.slurm import status_of
from meshwright.launch.slurm.commands import job_state
from meshwright.launch.slurm.commands import test_only as require_accepted
from meshwright.launch.worker import run_rank
from meshwright.verify.ranks import run_ranks

PROFILE = """
title = "the tests' own cluster"
gpus_per_node = 2
partition = "main"
gpu_request = "none"
time = "10"
"""
STEPS = 24
JOB = f"""
[model]
preset = "tiny-llama"

[data]
sources = ["corpus"]
cache = "cache"
validation_fraction = 0.2
workers = 0

[batch]
sequence_length = 32
global_batch = 4
micro_batch = 1

[evaluation]
every_steps = 0

[run]
steps = {STEPS}
device = "cpu"
"""
TWO_BY_TWO = ["layout.dp_shard=2", "layout.tp=2"]
TWO_NODES = ["layout.dp_replicate=2", "checkpoint.every_steps=4"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if why := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(f"no Slurm to test with: {why}")
        pytest.skip(f"no Slurm to test with: {why}")
    started = Cluster()
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a job, its corpus and a profile; every run and the runs they are compared with lie in it."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "corpus").mkdir()
    for number in range(60):
        (folder / f"corpus/{number:02}.py").write_text(f"def add_{number}(a, b):\n    return a + b + {number}\n" * 8)
    (folder / "job.toml").write_text(JOB)
    (folder / "mine.toml").write_text(PROFILE)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def meshwright(*words: str) -> str:
    """The command in this process, which has torch already."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["meshwright", *words])
        with contextlib.suppress(SystemExit):
            main()
    return out.getvalue()


def submit(run: str, *words: str, settings: list[str]) -> list[str]:
    sets = [word for setting in (*settings, f"run.folder={run}") for word in ("--set", setting)]
    return json.loads(meshwright("submit", "job.toml", *sets, "--site", "mine.toml", *words, "--json"))["jobs"]


def until(condition: Callable[[], bool], run: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            texts = [f"{path}:\n{path.read_text()[-2000:]}" for path in Path(run).glob("slurm/*.out")]
            raise AssertionError("\n".join([told("scontrol", "show", "job"), str(status_of(Path(run))), *texts]))
        time.sleep(0.2)


def rows(run: str) -> list[dict]:
    path = Path(run, "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def attempts(run: str) -> int:
    events = [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]
    return sum(event["kind"] == "start" for event in events)


def losses(run: str) -> list[tuple]:
    """Of the valid rows, what must not depend on interruptions."""
    from meshwright.launch import RunFolder

    return [tuple(row[name] for name in ("step", "loss", "grad_norm", "lr")) for row in RunFolder.open(Path(run)).metrics()]


def _train(*overrides: str) -> None:
    place = find_place(os.environ)
    assert place is not None
    run_rank(load_job("job.toml", overrides), place, Console(quiet=True))


def signal_before_the_limit(job: str) -> None:
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)


def test_a_signalled_job_saves_is_queued_again_and_ends_with_the_losses_of_a_quiet_one(
    cluster: Cluster, work: Path
) -> None:
    (job,) = submit("signalled", settings=TWO_BY_TWO)
    until(lambda: len(rows("signalled")) > 2, "signalled")
    assert status_of(Path("signalled")).state == "running"
    signal_before_the_limit(job)
    until(lambda: (job_state(job) or pytest.fail("gone")).waits, "signalled")
    requeued = status_of(Path("signalled"))
    assert requeued.state == "requeued" and f"of {STEPS}" in requeued.why
    stopped_at = newest(Path("signalled")).facts.step
    assert 0 < stopped_at < STEPS
    until(lambda: len(losses("signalled")) == STEPS and Path("signalled/slurm/over").exists(), "signalled")
    assert status_of(Path("signalled")).state == "done"
    assert attempts("signalled") == 2
    run_ranks(_train, 4, *TWO_BY_TWO, "run.folder=quiet")
    assert losses("signalled") == losses("quiet")
    assert "resuming from step" in meshwright("logs", "signalled")
