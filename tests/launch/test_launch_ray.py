"""Runs on a real Ray cluster: submitted, followed, cancelled, resumed, shrunk when a raylet dies, grown when one
returns; and what is rejected."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch_processes import left_over

import meshwright
from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.launch.ray import FOLDER, Submission
from meshwright.launch.ray.host import Host
from meshwright.launch.ray.placement import room_of, split, splits
from meshwright.layout import ranks_of
from meshwright.runs import RunFolder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from ray_cluster import IP, JOB, RayCluster, ray_cluster

WAIT_S = 300.0  # only for a machine that is very busy


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := true()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


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
    with ray_cluster((2, 2, 1)) as cluster:
        yield cluster


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

    command("submit", "job.toml", "--on", "ray", "--address", cluster.address, "--min-ranks", "2")
    logs = subprocess.Popen(
        [warm_command / "meshwright", "logs", str(run), "--follow"], stdout=subprocess.PIPE, text=True, cwd=place
    )
    until(stepped(0), "the first attempt")
    status = vars(status_of(run))
    with pytest.raises(UserError) as refused:
        command("submit", str(run), "--on", "ray")
    cancelled = vars(cancel(run, WAIT_S))
    followed = logs.communicate(timeout=WAIT_S)[0]
    command("submit", str(run), "--on", "ray", "--min-ranks", "2")
    until(stepped(1), "the resumed attempt")
    cluster.kill(cluster.nodes[0])
    until(stepped(2), "the attempt on fewer ranks")
    cluster.add(2)
    until(stepped(3), "the attempt on all ranks again")
    cancel(run, WAIT_S)
    until(lambda: not left_over(str(run)), "the end of all processes")
    ends = [event["step"] for event in folder.events("stop")]
    groups = [one["state"] for one in placement_group_table().values()]
    return Story(run, status, followed, cancelled, str(refused.value), ends, groups, ray.available_resources())


def test_a_submitted_run_is_followed_and_cancelled(story: Story) -> None:
    assert story.status["state"] == "running" and story.status["nodes"] == IP
    assert "4 ranks" in story.status["why"] and story.status["step"] >= 1
    assert "step 1/1000000  loss" in story.followed
    assert "already runs in the cluster" in story.refused and "meshwright cancel" in story.refused
    assert story.cancelled["state"] == "cancelled" and story.cancelled["step"] == story.ends[0]


def test_it_continues_on_what_is_left_and_grows_again(story: Story) -> None:
    assert [event["ranks"] for event in story.starts()] == [4, 4, 2, 4]
    # Every attempt began where the one before had saved: no step was lost, not even to the lost raylet.
    assert [event["step"] for event in story.starts()] == [0, *story.ends[:-1]]
    restarts = RunFolder.open(story.run).events("restart")
    assert [event["cause"] for event in restarts] == ["a machine or its raylet was lost"]
    assert [event["signal"] for event in RunFolder.open(story.run).events("stop")][2:] == ["more machines", "cancelled"]


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


def test_fewer_ranks_continue_as_a_quiet_run_would(story: Story, warm_command: Path, place: Path) -> None:
    """Resumed from the same checkpoint on so many local ranks, every loss has the same bits."""
    begin, end = story.ends[1], story.ends[2]
    quiet = place / "quiet"
    shutil.copytree(story.run, quiet)
    for later in (quiet / "checkpoints").glob("step-*"):
        if int(later.name.removeprefix("step-")) > begin:
            shutil.rmtree(later)
    shutil.rmtree(quiet / FOLDER)
    train(warm_command, place, str(quiet), "layout.dp_shard=1", f"run.steps={end}", words=["--resume", "--nproc", "2"])
    expected = {row["step"]: row["loss"] for row in RunFolder.open(quiet).metrics()}
    assert max(expected) == end > begin
    shrunk = {row["step"]: row["loss"] for row in story.rows() if begin < row["step"] <= end}
    assert shrunk == {step: loss for step, loss in expected.items() if step > begin}


def train(warm_command: Path, place: Path, job: str, *changes: str, words: list[str] | None = None) -> None:
    settings = [word for change in changes for word in ("--set", change)]
    called = [str(warm_command / "meshwright"), "train", job, "--quiet", *settings, *(words or [])]
    done = subprocess.run(called, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_program_trains_with_the_package_it_sends(place: Path, cluster: RayCluster, apart: None) -> None:
    import ray

    changes = {"run.steps": 2, "layout.dp_shard": 1, "layout.tp": 1, "run.folder": "sent"}
    run = meshwright.ray.train(meshwright.load_job("job.toml", set=changes), address=cluster.address, ship=True)
    assert run.state == "done" and len(run.losses) == 2
    assert ray.get_runtime_context().runtime_env["py_modules"][0].startswith("gcs://")
    with pytest.raises(UserError, match="this program is connected to the cluster at"):
        meshwright.ray.train("sent", address="127.0.0.3:9")


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
    assert "the cluster's machines hold 2, 2, 1" in report and "--min-ranks" in report
    assert "at least 5 of 8 ranks" in rejected(place, *many, "--min-ranks", "5")
    assert "each a GPU and a CPU" in rejected(place, "--address", cluster.address, "--set", "run.device=cuda")


def test_another_meshwright_on_the_head(place: Path, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.version import VERSION

    monkeypatch.setattr("meshwright.launch.ray_submit.VERSION", "0.0.1")
    report = rejected(place, "--address", cluster.address)
    assert report.startswith(f"the cluster's head has meshwright {VERSION}, this machine 0.0.1;")


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


# How ranks are split over machines.


def job(tmp_path: Path, *overrides: str) -> Job:
    (tmp_path / "job.toml").write_text(JOB)
    return load_job(str(tmp_path / "job.toml"), overrides).job


def shape(found: Any) -> tuple[int, int] | None:
    return None if found is None else (found.bundles, found.ranks_per_bundle)


def test_tensor_parallel_ranks_stay_on_one_machine(tmp_path: Path) -> None:
    four = job(tmp_path)
    assert shape(split(four, [4])) == (1, 4)
    assert shape(split(four, [3, 2, 1])) == (2, 2)
    assert split(four, [3, 1, 1, 1]) is None
    assert shape(split(job(tmp_path, "layout.tp=1", "layout.dp_shard=4", "batch.micro_batch=1"), [3, 1])) == (4, 1)
    assert split(four, [3, 2]).resources(gpus=True) == [{"CPU": 2.0, "GPU": 2.0}] * 2


def test_smaller_layouts_keep_the_batch(tmp_path: Path) -> None:
    eight = job(tmp_path, "layout.dp_shard=6", "batch.global_batch=12", "batch.micro_batch=1")

    def ranks(room: list[int], least: int = 1) -> list[int]:
        return [ranks_of(one.job.layout) for one in splits(eight, room, least)]

    assert ranks([12]) == [12, 8, 6, 4, 2]  # dp 5 does not divide the batch
    assert ranks([8, 2]) == [8, 6, 4, 2]
    assert ranks([8, 2], least=5) == [8, 6]
    assert {one.job.batch.global_batch for one in splits(eight, [12], 1)} == {12}


def test_room_of_machines() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 16.0}},
    ]
    assert room_of(nodes, gpus=True) == [4, 0]
    assert room_of(nodes, gpus=False) == [16, 8]
