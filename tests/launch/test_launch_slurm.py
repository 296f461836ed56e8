"""Runs on a real Slurm that this file starts: signalled, requeued, moved off a lost node, chained, cancelled."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launch_processes import left_over
from rich.console import Console
from slurm_cluster import Cluster, missing, told

from meshwright.checkpoint import newest
from meshwright.cli import main
from meshwright.errors import UserError
from meshwright.hardware import known_sites
from meshwright.job import load_job
from meshwright.launch.slurm import Status, cancel, status_of
from meshwright.launch.slurm.commands import SlurmJob, job_state
from meshwright.launch.slurm.commands import test_only as require_accepted
from meshwright.launch.worker import run_job
from meshwright.ranks import find_place
from meshwright.runs import RunFolder
from meshwright.verify.ranks import run_ranks

pytestmark = pytest.mark.thorough

PROFILE = """
title = "the tests' own cluster"
gpus_per_node = {ranks}
partition = "main"
gpu_request = "none"
time = "10"
"""
STEPS = 24
# Imported by every Python of a job. An attempt with a gate waits after the step that its file names, until the test has
# done to it what it wants and opens the gate.
SLOW = """
import time
from pathlib import Path
from meshwright.runs import RunFolder

metric = RunFolder.metric

def slow(self, row):
    metric(self, row)
    time.sleep(0.15)
    gate = Path(self.path).parent / "gates" / f"{Path(self.path).name}-{row['attempt']}"
    while gate.is_file() and row["step"] >= int(gate.read_text()):
        time.sleep(0.05)

RunFolder.metric = slow
"""
GATES = {"outlived-0": 100, "signalled-0": 8, "moved-0": 8, "chained-0": 6, "chained-1": 14}
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
# Kept apart, so that a node one run loses is not another's.
LEFT, RIGHT = "--exclude=node03,node04,node05", "--exclude=node01,node02"
RUNS = {
    "outlived": (["--sbatch", LEFT], ["run.steps=120"]),
    "signalled": (["--sbatch", LEFT], ["layout.dp_replicate=4"]),
    "moved": (["--sbatch", RIGHT, "--per-rank"], ["layout.dp_replicate=2", "checkpoint.every_steps=2", "run.steps=48"]),
    "chained": (["--sbatch", LEFT, "--chain", "3"], []),
    "cancelled": (["--sbatch", LEFT, "--chain", "2"], ["run.steps=100000"]),
    "tried": (["--sbatch", LEFT, "--ladder", "--budget", "0.8"], ["layout.dp_replicate=2", "run.steps=10000000"]),
}


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
    assert left_over(str(started.folder)) == [] and started.tag not in told("ip", "netns", "list")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a job, its corpus and a profile; every run and the runs they are compared with lie in it."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "corpus").mkdir()
    for number in range(60):
        (folder / f"corpus/{number:02}.py").write_text(f"def add_{number}(a, b):\n    return a + b + {number}\n" * 8)
    (folder / "job.toml").write_text(JOB)
    for name, ranks in (("pairs", 2), ("singles", 1)):
        (folder / f"{name}.toml").write_text(PROFILE.format(ranks=ranks))
    (folder / "gates").mkdir()
    for attempt, step in GATES.items():
        (folder / f"gates/{attempt}").write_text(str(step))
    (folder / "slow").mkdir()
    (folder / "slow/sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join([str(folder / "slow"), str(Path(__file__).parents[2])])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", path)
        yield folder


def meshwright(*words: str) -> str:
    """The command in this process, which has torch already."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["meshwright", *words])
        with contextlib.suppress(SystemExit):
            main()
    return out.getvalue()


def submit(run: str) -> list[str]:
    words, settings = RUNS[run]
    site = "singles.toml" if run == "moved" else "pairs.toml"
    sets = [word for setting in (*settings, f"run.folder={run}") for word in ("--set", setting)]
    return json.loads(meshwright("submit", "job.toml", *sets, "--site", site, *words, "--json"))["jobs"]


def until(condition: Callable[[], bool], run: str, seconds: float = 240, every_s: float = 0.2) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            texts = [f"{path}:\n{path.read_text()[-2000:]}" for path in Path(run).glob("slurm/*.out")]
            raise AssertionError("\n".join([told("scontrol", "show", "job"), str(status_of(Path(run))), *texts]))
        time.sleep(every_s)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    """As `until`, while nobody can ask Slurm."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def rows(run: str) -> list[dict]:
    path = Path(run, "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def starts(run: str) -> int:
    events = [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]
    return sum(event["kind"] == "start" for event in events)


def losses(run: str) -> list[tuple]:
    """Of the valid rows, what must not depend on interruptions."""
    return [
        tuple(row[name] for name in ("step", "loss", "grad_norm", "lr")) for row in RunFolder.open(Path(run)).metrics()
    ]


def state(job: str) -> SlurmJob:
    found = job_state(job)
    assert found is not None
    return found


def _train(*overrides: str) -> None:
    place = find_place(os.environ)
    assert place is not None
    run_job(load_job("job.toml", overrides), Console(quiet=True), place)


def signal_before_the_limit(run: str, job: str, attempt: int = 0) -> None:
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    let_it_stop(run, attempt)


def let_it_stop(run: str, attempt: int = 0) -> None:
    """Open an attempt's gate once the ranks have been asked to stop."""
    wait_for(Path(run, "logs/stop").exists, f"{run} is asked to stop")
    Path("gates", f"{run}-{attempt}").unlink()


@pytest.fixture(scope="module")
def ended(cluster: Cluster, work: Path) -> dict[str, "Future[Any]"]:
    """What became of every run; they go side by side, since each waits for Slurm most of the time."""
    [outlived] = submit("outlived")
    told_meanwhile = controller_dies(outlived, cluster)  # before the others, who ask Slurm all the time
    jobs = {run: submit(run) for run in RUNS if run != "outlived"}

    def outlives() -> Any:
        until(lambda: Path("outlived/slurm/over").exists(), "outlived")
        return told_meanwhile

    scenarios = {
        "outlived": outlives,
        "signalled": lambda: signalled(jobs["signalled"][0]),
        "moved": lambda: moved(jobs["moved"][0], cluster),
        "chained": lambda: chained(jobs["chained"]),
        "cancelled": lambda: cancelled(jobs["cancelled"]),
        "tried": lambda: until(lambda: status_of(Path("tried")).state == "failed", "tried", every_s=1),
    }
    with ThreadPoolExecutor(len(scenarios)) as pool:
        return {name: pool.submit(scenario) for name, scenario in scenarios.items()}


def batch_script(cluster: Cluster, job: str) -> int:
    """The process of a job's script; other clusters on this machine have jobs of the same number."""
    start = f"{cluster.folder}/spool/".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            ours = [word for word in words if word.startswith(start) and word.endswith(b"/slurm_script")]
            if any(f"/job{int(job):05d}/".encode() in word for word in ours):
                return int(entry.name)
    raise AssertionError(f"no script of job {job} runs")


def controller_dies(job: str, cluster: Cluster) -> tuple["subprocess.CompletedProcess[str]", str, str]:
    """Steps are made without a controller, and a job that is to be queued again waits for the next one."""
    until(lambda: len(rows("outlived")) > 2 and b"node01" in cluster.saved_jobs(), "outlived")  # it is known to run
    cluster.kill_controller()
    made, log = len(rows("outlived")), Path(f"outlived/slurm/job-{job}.out")
    words = [sys.executable, "-m", "meshwright", "status", "outlived"]
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    logged = meshwright("logs", "outlived")
    wait_for(lambda: len(rows("outlived")) > made, "steps")
    os.kill(batch_script(cluster, job), signal.SIGUSR1)  # as before its time limit
    let_it_stop("outlived")
    wait_for(lambda: log.read_text().count(f"for job {job}\n") > 1, "a requeue is tried in vain")
    cluster.start_controller()
    return asked, logged, job


def signalled(job: str) -> tuple[Status, Status, int]:
    until(lambda: len(rows("signalled")) > 0, "signalled")
    running = status_of(Path("signalled"))
    signal_before_the_limit("signalled", job)
    until(lambda: state(job).waits, "signalled")
    requeued, step = status_of(Path("signalled")), newest(Path("signalled")).facts.step
    until(lambda: Path("signalled/slurm/over").exists(), "signalled")
    return running, requeued, step


def moved(job: str, cluster: Cluster) -> tuple[str, str]:
    until(lambda: any(Path("moved/checkpoints").glob("step-*/*")) and len(rows("moved")) > 2, "moved")
    before = state(job).nodes
    cluster.crash("node04")
    Path("gates/moved-0").unlink()
    until(lambda: Path("moved/slurm/over").exists(), "moved")
    return before, RunFolder.open(Path("moved")).attempt(1)["environment"]["variables"]["SLURM_JOB_NODELIST"]


def attempts_are(count: int) -> bool:
    return len({row["attempt"] for row in rows("chained")}) == count


def chained(jobs: list[str]) -> list[str]:
    for number, job in enumerate(jobs[:-1]):
        until(partial(attempts_are, number + 1), "chained")
        signal_before_the_limit("chained", job, number)
    until(lambda: Path("chained/slurm/over").exists() and not state(jobs[-1]).active, "chained")
    return [state(job).exit_code for job in jobs]


def cancelled(jobs: list[str]) -> Status:
    until(lambda: len(rows("cancelled")) > 0, "cancelled")
    return cancel(Path("cancelled"), wait_s=120)


def test_a_signalled_job_saves_is_queued_again_and_ends_as_a_quiet_one(ended: dict[str, "Future[Any]"]) -> None:
    running, requeued, step = ended["signalled"].result()
    assert running.state == "running" and running.nodes == "node[01-02]"
    assert requeued.state == "requeued" and f"of {STEPS}" in requeued.why and 0 < step < STEPS
    assert status_of(Path("signalled")).state == "done" and starts("signalled") == 2
    run_ranks(_train, 4, *RUNS["signalled"][1], "run.folder=quiet-4")
    assert losses("signalled") == losses("quiet-4")
    assert f"resuming from step {step} (attempt 1)" in meshwright("logs", "signalled")


def test_a_run_that_loses_a_node_goes_on_elsewhere_and_ends_as_a_quiet_one(ended: dict[str, "Future[Any]"]) -> None:
    before, after = ended["moved"].result()
    assert before == "node[03-04]" and after == "node[03,05]"
    assert status_of(Path("moved")).state == "done" and starts("moved") == 2
    run_ranks(_train, 2, *RUNS["moved"][1], "run.folder=quiet-2")
    assert losses("moved") == losses("quiet-2")
    assert "resuming from step" in meshwright("logs", "moved", "--rank", "0")


def test_a_chain_of_three_jobs_ends_as_one_quiet_job(ended: dict[str, "Future[Any]"]) -> None:
    assert ended["chained"].result() == ["85:0", "85:0", "0:0"]
    assert status_of(Path("chained")).state == "done" and starts("chained") == 3
    assert left_over(f"{Path.cwd()}/") == [], "of no run a process is left"
    run_job(load_job("job.toml", ["run.folder=quiet-1"]), Console(quiet=True))
    assert losses("chained") == losses("quiet-1")


def test_a_cancelled_run_has_saved_and_does_not_come_back(ended: dict[str, "Future[Any]"]) -> None:
    status = ended["cancelled"].result()
    assert status.state == "cancelled" and newest(Path("cancelled")).facts.step == status.step > 0
    assert starts("cancelled") == 1
    assert json.loads(meshwright("status", "--all", ".", "--json"))[0]["state"], "all runs are told"


def test_a_trial_that_costs_too_much_lets_no_run_start(ended: dict[str, "Future[Any]"]) -> None:
    ended["tried"].result()
    status = status_of(Path("tried"))
    assert status.state == "failed" and "no-go from the trial on 1: the run would take" in status.why
    assert not rows("tried") and len(rows("tried/ladder/1")) == 20


def test_a_run_outlives_a_controller_that_dies_and_its_requeue_waits_for_the_next_one(
    ended: dict[str, "Future[Any]"],
) -> None:
    asked, logged, job = ended["outlived"].result()
    assert asked.returncode == 2 and len(asked.stderr.splitlines()) == 1
    assert f"Slurm does not report the state of job {job}" in asked.stderr and "retry once" in asked.stderr
    assert f"job {job}, start 0" in logged
    assert status_of(Path("outlived")).state == "done" and starts("outlived") == 2
    run_job(load_job("job.toml", ["run.folder=quiet-long", *RUNS["outlived"][1]]), Console(quiet=True))
    assert losses("outlived") == losses("quiet-long")


@pytest.mark.parametrize("name", known_sites())
def test_slurm_accepts_the_script_of(cluster: Cluster, work: Path, name: str) -> None:
    site = known_sites()[name]
    sets = [f"layout.dp_shard={2 * site.gpus_per_node}", f"batch.global_batch={2 * site.gpus_per_node}"]
    words = [word for setting in sets for word in ("--set", setting)]
    given = ["--account", "project", "--qos", "any", "--time", "12:00:00", "--site", name]
    script = meshwright("submit", "job.toml", *words, *given, "--dry-run")
    path = work / f"{name}.sh"
    path.write_text(script)
    require_accepted(path)
    assert site.partition is not None and f"--partition={site.partition}" in script
    path.write_text(script.replace(f"--partition={site.partition}", "--partition=nowhere"))
    with pytest.raises(UserError, match=r"sbatch failed: .*partition"):
        require_accepted(path)
