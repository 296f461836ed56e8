"""What the pods of a manifest run, really run: two nodes train, save when they get SIGTERM, and resume.

There is no Kubernetes here; `pods.py` says what stands in for it.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pods import container_start, free_port, nodes

from meshwright.job import load_job
from meshwright.launch.kubernetes import manifests, request_of

SMALL = str(Path(__file__).parents[1] / "small.toml")


@pytest.fixture
def site(tmp_path: Path) -> str:
    volume = tmp_path / "volume"
    volume.mkdir()
    path = tmp_path / "site.toml"
    path.write_text(f'gpus_per_node = 1\n[kubernetes]\nimage = "i"\nvolume = "v"\nmount = "{volume}"\n')
    return str(path)


def two_pods(site: str, kind: str, steps: int, tmp_path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The manifest of a job on two nodes, and how each of its containers starts."""
    overrides = ["layout.dp_replicate=2", f"run.steps={steps}", "run.folder=runs/two", "checkpoint.every_steps=0"]
    config, document = manifests(request_of(load_job(SMALL, overrides), site, kind))
    (job_file := tmp_path / "job.toml").write_text(config["data"]["job.toml"])
    port = str(free_port())
    spec = document["spec"]
    if kind == "jobset":
        template = spec["replicatedJobs"][0]["template"]["spec"]["template"]
        (container,) = template["spec"]["containers"]
        assert {"name": "MASTER_ADDR", "value": "two-node-0-0.two"} in container["env"]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        given = [{"JOB_COMPLETION_INDEX": str(number), **meeting} for number in range(2)]
        return document, [container_start(container, variables, job_file) for variables in given]
    replicas = spec["pytorchReplicaSpecs"]
    containers = [replicas[name]["template"]["spec"]["containers"][0] for name in ("Master", "Worker")]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    given = [{"RANK": str(number), **meeting} for number in range(2)]
    return document, [container_start(*one, job_file) for one in zip(containers, given, strict=True)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_two_pods_train_save_on_sigterm_and_resume(site: str, tmp_path: Path, kind: str) -> None:
    run = tmp_path / "volume/runs/two"
    with nodes(tmp_path) as pods:
        document, starts = two_pods(site, kind, 10**6, tmp_path)
        for start in starts:
            pods.start(*start)
        pods.until(lambda: len(lines(run / "metrics.jsonl")) > 3)
        # Deleting a JobSet signals every pod, a drained machine only its own.
        for pid in pods.pids if kind == "jobset" else pods.pids[1:]:
            os.kill(pid, signal.SIGTERM)
        codes = pods.codes()
        saved = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
        assert lines(run / "metrics.jsonl")[-1]["step"] == saved > 3, pods.output()
        assert lines(run / "events.jsonl")[-1]["signal"] == "SIGTERM"
        if kind == "jobset":
            job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
            restarted = job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
            assert codes == restarted * 2, "which restarts the set without counting"
        else:
            assert all(codes), "OnFailure starts both again"

        _, starts = two_pods(site, kind, saved + 2, tmp_path)
        for start in starts:
            pods.start(*start)
        assert pods.codes() == [0, 0], pods.output()
    assert [row["step"] for row in lines(run / "metrics.jsonl") if "loss" in row] == list(range(1, saved + 3))
    assert {row["attempt"] for row in lines(run / "metrics.jsonl")} == {0, 1}


def test_a_node_that_cannot_see_the_run_folder_says_so(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.launch.multi_node.MEETING_S", 0.0)
    node = ["--nproc", "1", "--nodes", "2", "--node-rank", "1", "--master", "127.0.0.1:1"]
    told = cli("train", SMALL, "--resume", "--set", "layout.dp_replicate=2", *node)
    assert told.code == 2 and len(told.err.splitlines()) == 1
    assert (
        'run.folder = "run" did not appear here within 0 s; the first machine creates it: use a disk that' in told.err
    )
