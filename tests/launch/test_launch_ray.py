"""Runs on a real Ray cluster: submitted, followed, cancelled, resumed, shrunk when a raylet dies, grown when one
returns; and what is rejected."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_processes import left_over
from waiting import wait_until

import meshwright
from meshwright.errors import UserError
from meshwright.launch.ray import FOLDER, Submission
from meshwright.launch.ray.host import Host
from meshwright.runs import RunFolder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from ray_cluster import IP, JOB, RayCluster, ray_cluster

pytestmark = pytest.mark.thorough

REST = ", micro-batch 2, recompute none"
WAIT_S = 300.0  # only for a machine that is very busy


def until(true: Callable[[], Any], what: str) -> Any:
    return wait_until(true, what, WAIT_S)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "job.toml").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr("sys.argv", ["meshwright"])
        yield folder


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[RayCluster]:
    handler = signal.getsignal(signal.SIGTERM)
    with ray_cluster((2, 2, 1)) as cluster:
        yield cluster
    signal.signal(signal.SIGTERM, handler)  # Ray leaves its own, also in the processes that later tests fork


def command(*words: str) -> None:
    """The command line in this process, which stays connected to the cluster."""
    from meshwright.cli import app

    app(list(words), standalone_mode=False)


@dataclass
class Story:
    """What happened to one run."""

    run: Path
    status: dict[str, Any]
    followed: str
    cancelled: dict[str, Any]
    refused: str
    planned: dict[str, Any]
    """Its status in the layout that the planner chose."""
    ends: list[int]
    """The last step of every attempt."""
    groups: list[str]
    """The states of all placement groups at the end."""
    free: dict[str, float]

    def rows(self) -> list[dict[str, Any]]:
        return RunFolder.open(self.run).metrics()

    def starts(self) -> list[dict[str, Any]]:
        return RunFolder.open(self.run).events("start")


@pytest.fixture(scope="module")
def story(place: Path, cluster: RayCluster, warm_command: Path) -> Story:
    import ray
    from ray.util import placement_group_table

    from meshwright.launch.submitted import cancel, status_of

    run = place / "run"
    folder = RunFolder(run)

    def stepped(attempt: int, steps: int = 4) -> Callable[[], bool]:
        return lambda: (
            (run / "metrics.jsonl").is_file()
            and sum(row["attempt"] == attempt for row in folder.newest().rows) >= steps
        )

    command("submit", "job.toml", "--on", "ray", "--address", cluster.address, "--min-ranks", "1")
    logs = subprocess.Popen(
        [warm_command / "meshwright", "logs", str(run), "--follow"], stdout=subprocess.PIPE, text=True, cwd=place
    )
    until(stepped(0), "the first attempt")
    status = vars(status_of(run))
    with pytest.raises(UserError) as refused:
        command("submit", str(run), "--on", "ray")
    cancelled = vars(cancel(run, WAIT_S))
    followed = logs.communicate(timeout=WAIT_S)[0]
    cluster.kill(cluster.nodes[0])
    until(lambda: sum(node["Alive"] for node in ray.nodes()) == 3, "the loss of the first raylet")
    command("submit", str(run), "--on", "ray", "--min-ranks", "1")
    until(stepped(1), "the resumed attempt, on fewer ranks")
    cluster.kill(cluster.nodes[1])
    until(stepped(2), "the attempt without tensor parallelism")
    planned = vars(status_of(run))
    cluster.add(4)
    until(stepped(3), "the attempt on all ranks again")
    cancel(run, WAIT_S)
    until(lambda: not left_over(str(run)), "the end of all processes")
    ends = [event["step"] for event in folder.events("stop")]
    groups = [one["state"] for one in placement_group_table().values()]
    free = ray.available_resources()
    return Story(run, status, followed, cancelled, str(refused.value), planned, ends, groups, free)


def test_a_submitted_run_is_followed_and_cancelled(story: Story) -> None:
    assert story.status["state"] == "running" and story.status["nodes"] == IP
    assert "4 ranks" in story.status["why"] and story.status["step"] >= 1
    assert "step 1/1000000  loss" in story.followed
    assert "already runs in the cluster" in story.refused and "meshwright cancel" in story.refused
    assert story.cancelled["state"] == "cancelled" and story.cancelled["step"] == story.ends[0]


def test_it_continues_on_what_is_left_and_grows_again(story: Story) -> None:
    assert [event["ranks"] for event in story.starts()] == [4, 2, 1, 4]
    # Every attempt began where the one before had saved: no step was lost, not even to the lost raylet.
    assert [event["step"] for event in story.starts()] == [0, *story.ends[:-1]]
    restarts = RunFolder.open(story.run).events("restart")
    assert [event["cause"] for event in restarts] == ["a machine or its raylet was lost"]
    assert [event["signal"] for event in RunFolder.open(story.run).events("stop")][2:] == ["more machines", "cancelled"]


def test_every_change_of_the_layout_is_recorded(story: Story) -> None:
    """tp 2 stays as long as a machine holds it, then the planner chooses; once one is added, all is as submitted."""
    first, second, third = RunFolder.open(story.run).events("replan")
    assert (first["before"], first["after"]) == ("dp 2, zero 2, tp 2" + REST, "dp 1, zero 0, tp 2" + REST)
    assert first["why"] == "fewer data-parallel ranks" and first["changed"] == {"layout.dp_shard": [2, 1]}
    assert second["before"] == first["after"] and second["after"].startswith("dp 1, zero 0, micro-batch")
    assert second["why"].startswith("planned for 1 rank on 1 machine") and second["changed"]["layout.tp"] == [2, 1]
    assert (third["after"], third["why"]) == (first["before"], "as submitted")
    assert [event["step"] for event in (first, second, third)] == story.ends[:3]
    assert second["after"] in story.planned["why"] and "planned for 1 rank" in story.planned["why"]
    assert RunFolder.open(story.run).resolved_job().layout.tp == 2


def test_nothing_is_left_in_the_cluster(story: Story) -> None:
    assert len(story.groups) >= 4 and set(story.groups) == {"REMOVED"}
    assert story.free["CPU"] == 5.0
    assert left_over(str(story.run)) == []


def test_every_sample_counts_once_and_losses_equal_one_process(story: Story, warm_command: Path, place: Path) -> None:
    rows = story.rows()
    assert [row["step"] for row in rows] == list(range(1, story.ends[-1] + 1))
    assert [row["tokens"] for row in rows] == [64 * row["step"] for row in rows]
    changes = ["layout.dp_shard=1", "layout.tp=1", "run.folder=alone", f"run.steps={len(rows)}"]
    train(warm_command, place, "job.toml", *changes)
    alone = [row["loss"] for row in RunFolder.open(place / "alone").metrics()]
    assert [row["loss"] for row in rows] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("attempt", [1, 2], ids=["fewer", "planned"])
def test_fewer_ranks_continue_as_a_quiet_run_would(story: Story, warm_command: Path, place: Path, attempt: int) -> None:
    """Resumed from the same checkpoint in the same layout on this machine alone, every loss has the same bits."""
    begin, end = story.ends[attempt - 1], story.ends[attempt]
    quiet = place / f"quiet-{attempt}"
    shutil.copytree(story.run, quiet)
    for later in (quiet / "checkpoints").glob("step-*"):
        if int(later.name.removeprefix("step-")) > begin:
            shutil.rmtree(later)
    shutil.rmtree(quiet / FOLDER)
    recorded = RunFolder.open(story.run).events("replan")[attempt - 1]
    changes = [f"{name}={now}" for name, (_, now) in recorded["changed"].items() if now is not None]
    changes += ["layout.dp_shard=1", f"run.steps={end}"]
    train(warm_command, place, str(quiet), *changes, words=["--resume", "--nproc", str(recorded["ranks"])])
    expected = {row["step"]: row["loss"] for row in RunFolder.open(quiet).metrics()}
    assert max(expected) == end > begin
    shrunk = {row["step"]: row["loss"] for row in story.rows() if begin < row["step"] <= end}
    assert shrunk == {step: loss for step, loss in expected.items() if step > begin}


def train(warm_command: Path, place: Path, job: str, *changes: str, words: list[str] | None = None) -> None:
    settings = [word for change in changes for word in ("--set", change)]
    called = [str(warm_command / "meshwright"), "train", job, "--quiet", *settings, *(words or [])]
    done = subprocess.run(called, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_script_of_a_ray_job_runs(
    place: Path, cluster: RayCluster, warm_command: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What KubeRay runs on a cluster's head, on this one; its volume and its ConfigMap are folders here."""
    volume = place / "volume"
    (volume / "bin").mkdir(parents=True)
    (python := volume / "bin/python").write_text(f'#!/bin/sh\nshift 3\nexec {warm_command}/meshwright "$@"\n')
    python.chmod(0o755)
    changes = ["run.steps=2", "layout.dp_shard=1", "layout.tp=1", "run.folder=job"]
    words = [word for change in changes for word in ("--set", change)]
    words += ["--kind", "rayjob", "--container", "image", "--volume", "shared", "--dry-run"]
    capsys.readouterr()
    command("submit", "job.toml", "--on", "kubernetes", *words)
    config = next(yaml.safe_load_all(capsys.readouterr().out))
    for name, text in config["data"].items():
        (volume / name).write_text(text.replace("/etc/meshwright", str(volume)).replace("/mnt/meshwright", str(volume)))
    variables = {**os.environ, "PATH": f"{volume}/bin:{os.environ['PATH']}", "RAY_ADDRESS": cluster.address}
    done = subprocess.run(["bash", volume / "ray.sh"], env=variables, cwd=volume, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss" in done.stdout and "all steps are done" in done.stdout
    assert RunFolder.open(volume / "job").state() == "done"


# A dataset of Ray Data.

TEXTS = [f"row {number} of the dataset, which is some text to train on" for number in range(300)]
BLOCKS = 3
"""Unless told, Ray makes a block of every row or two, and a shuffle runs tasks for each."""


def test_a_program_trains_on_its_dataset_with_the_package_it_sends(
    place: Path, cluster: RayCluster, apart: None, warm_command: Path
) -> None:
    import ray

    from meshwright.launch.ray.connection import connect

    connect(cluster.address, ship=True)
    assert ray.get_runtime_context().runtime_env["py_modules"][0].startswith("gcs://")
    dataset = ray.data.from_items([{"text": text} for text in TEXTS], override_num_blocks=BLOCKS)
    changes = {"run.steps": 2, "layout.dp_shard": 1, "layout.tp": 1, "run.folder": "rows"}
    given = job_without_sources(place, changes)
    run = meshwright.ray.train(given, address=cluster.address, ship=True, dataset=dataset)
    assert run.state == "done"
    # As the same rows in a file are trained on by one process.
    kept = place / "rows/data/rows.jsonl"
    assert [json.loads(line)["text"] for line in kept.read_text().splitlines()] == TEXTS
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = [f"{name}={value}" for name, value in (changes | {"run.folder": "local"}).items()]
    train(warm_command, place, "job.toml", *settings, 'data.sources=["texts.jsonl"]')
    assert run.losses == [row["loss"] for row in RunFolder.open(place / "local").metrics()]
    # It continues without the dataset, or with one that has the same rows, and with no other.
    other = ray.data.from_items([{"text": text} for text in reversed(TEXTS)], override_num_blocks=BLOCKS)
    with pytest.raises(UserError, match=r"dataset does not have the rows, in their order, that .* began with"):
        meshwright.ray.train(place / "rows", dataset=other)
    with pytest.raises(UserError, match="was not started from a dataset"):
        meshwright.ray.train(place / "local", dataset=dataset)
    with pytest.raises(UserError, match="this program is connected to the cluster at"):
        meshwright.ray.train("rows", address="127.0.0.3:9")


def test_datasets_that_are_rejected(place: Path, cluster: RayCluster) -> None:
    import ray

    from meshwright.launch.ray.connection import connect

    connect(cluster.address)
    dataset = ray.data.from_items([{"text": text} for text in TEXTS], override_num_blocks=BLOCKS)

    def rejected(given: Any, job: Any = None) -> str:
        with pytest.raises(UserError) as error:
            meshwright.ray.train(job or job_without_sources(place, {"run.folder": "unfit"}), dataset=given)
        assert not (place / "unfit").exists() and "\n" not in str(error.value)
        return str(error.value)

    assert "another order, each time it is read" in rejected(dataset.random_shuffle())
    assert rejected(["a text"]).startswith("dataset = list is not a dataset of Ray Data")
    assert "row 1 has no text in 'text', only 'body'" in rejected(ray.data.from_items([{"body": "a"}]))
    raw = ray.data.from_items([{"text": "a", "raw": b"x"}])
    assert "row 1 cannot be written as JSON (a value is of type bytes)" in rejected(raw)
    assert rejected(dataset.limit(0)) == "dataset has no rows; give one that has some"
    own = meshwright.load_job("job.toml", set={"run.folder": "unfit"})
    assert "data.sources = ['builtin:synthetic'] and a dataset are both given" in rejected(dataset, own)


def job_without_sources(place: Path, changes: dict[str, Any]) -> Any:
    (place / "rows.toml").write_text(JOB.replace('sources = ["builtin:synthetic"]\n', ""))
    return meshwright.load_job("rows.toml", set=changes)


# What is rejected; nothing of it leaves a run folder.


@pytest.fixture
def apart() -> Iterator[None]:
    """This process without a connection, as a new program."""
    import ray

    ray.shutdown()
    yield
    ray.shutdown()


def rejected(place: Path, *words: str) -> str:
    with pytest.raises(UserError) as error:
        command("submit", "job.toml", "--on", "ray", "--set", "run.folder=rejected", *words)
    assert not (place / "rejected").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_ray(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert rejected(place) == "Ray is not installed here; install it with pip install 'meshwright[ray]'"


def test_wrong_addresses(place: Path, apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--address 127.0.0.3:9 does not answer (Connection refused)" in rejected(place, "--address", "127.0.0.3:9")
    assert "which Ray takes as" in rejected(place, "--address", "127.0.0.1:9")
    assert "is not HOST:PORT" in rejected(place, "--address", "somewhere")
    assert "submit on a machine of the cluster" in rejected(place, "--address", "ray://127.0.0.1:10001")
    with socket.create_server(("127.0.0.3", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.6\r\n"), daemon=True).start()
        address = f"127.0.0.3:{other.getsockname()[1]}"
        assert f"--address {address} is not of a Ray cluster" in rejected(place, "--address", address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.3:9")
    assert "does not answer" in rejected(place)


def test_options_of_another_cluster(place: Path) -> None:
    assert rejected(place, "--site", "vega") == "--site is not for --on ray; leave it out"
    with pytest.raises(UserError, match="--min-ranks is not for --on slurm"):
        command("submit", "job.toml", "--min-ranks", "2")
    with pytest.raises(UserError, match="--on mesos is not known"):
        command("submit", "job.toml", "--on", "mesos")
    assert "--min-ranks 8 is more than the layout's 4 ranks" in rejected(place, "--min-ranks", "8")


def test_another_ray_on_the_cluster(
    place: Path, cluster: RayCluster, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    theirs = ray.__version__
    monkeypatch.setattr(ray, "__version__", "2.0.0")
    report = rejected(place, "--address", cluster.address)
    assert f"the cluster has Ray {theirs} on Python" in report and "this machine Ray 2.0.0 on Python" in report


def test_too_few_machines(place: Path, cluster: RayCluster) -> None:
    many = ("--address", cluster.address, "--set", "layout.dp_shard=4", "--set", "batch.micro_batch=1")
    report = rejected(place, *many)
    assert "the layout needs 8 ranks, each a CPU with each group of layout.tp = 2 on one machine" in report
    assert re.search("the cluster's machines hold (2, 2, 1|4, 1);", report) and "--min-ranks" in report
    assert "at least 5 of 8 ranks" in rejected(place, *many, "--min-ranks", "5")
    assert "each a GPU and a CPU" in rejected(place, "--address", cluster.address, "--set", "run.device=cuda")


def test_another_meshwright_on_the_head(place: Path, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.version import VERSION

    monkeypatch.setattr("meshwright.launch.ray_submit.VERSION", "0.0.1")
    report = rejected(place, "--address", cluster.address)
    assert report.startswith(f"the cluster's head has meshwright {VERSION}, this machine 0.0.1;")


def test_a_run_of_a_cluster_that_is_gone_continues_in_another(tmp_path: Path) -> None:
    from meshwright.launch.ray.status import require_idle
    from meshwright.version import VERSION

    with socket.create_server(("127.0.0.3", 0)) as other:
        address = f"127.0.0.3:{other.getsockname()[1]}"
        (tmp_path / FOLDER).mkdir()
        Submission(address, str(tmp_path), str(tmp_path), 1, False, VERSION).write()
        threading.Thread(target=lambda: other.accept()[0].sendall(b"\0\0\0\4\0\0\0\0\0"), daemon=True).start()
        with pytest.raises(UserError, match=r"which still runs, and not to the one at .*; run meshwright cancel"):
            require_idle(tmp_path, "127.0.0.4:1")
    require_idle(tmp_path, "127.0.0.4:1")


def test_a_cancel_that_comes_while_ranks_start_is_not_lost(place: Path) -> None:
    from meshwright.job import load_job
    from meshwright.launch.ray.status import STOP_FILE
    from meshwright.runs.lifecycle import create_folder
    from meshwright.version import VERSION

    run = place / "cancelled"
    values = {"run.folder": str(run), "run.steps": 1000, "layout.dp_shard": 1, "layout.tp": 1}
    folder = create_folder(load_job("job.toml", values), run)
    (run / FOLDER).mkdir()
    (run / "logs").mkdir()
    (run / STOP_FILE).write_text("cancelled")  # after the supervisor has looked for one, before a rank can
    with socket.create_server((IP, 0)) as server:
        port = server.getsockname()[1]
    host = Host(Submission(IP, str(run), str(place), 1, False, VERSION))
    host.start(0, (0, 1, f"{IP}:{port}"), 1)
    try:
        until(lambda: host.poll() is not None, "the ranks do not end")
    finally:
        host.kill()
    stop = folder.events("stop")[-1]
    assert (stop["reason"], stop["signal"], stop["step"]) == ("interrupted", "cancelled", 1)


def test_a_machine_that_does_not_see_the_run_says_so(tmp_path: Path) -> None:
    from meshwright.version import VERSION

    asked = Submission(IP, str(tmp_path / "run"), str(tmp_path), 1, False, VERSION)
    assert "does not see run.folder" in str(Host(asked).facts().error)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/job.resolved.json").write_text("{}")
    assert Host(asked).facts().error is None
    elsewhere = Submission(IP, asked.run, "/nowhere", 1, False, VERSION)
    assert "does not see /nowhere" in str(Host(elsewhere).facts().error)
    older = Submission(IP, asked.run, str(tmp_path), 1, False, "0.0.1")
    assert "install that one" in str(Host(older).facts().error)
