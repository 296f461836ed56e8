"""Task files for SkyPilot: matched with its schema, and what the nodes run really run, with its variables set.

There is no SkyPilot here: the volume is a folder, both nodes are 127.0.0.1, and the port is another one.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pods import free_port, nodes

from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.kubernetes import request_of, yaml_text
from meshwright.launch.sky import sky_task

SMALL = str(Path(__file__).parents[1] / "small.toml")
SCHEMA = Draft202012Validator(json.loads((Path(__file__).parent / "schemas/sky-task.json").read_text()))


def task_of(overrides: list[str], site: str | None = None, **options) -> dict[str, Any]:
    """The task, as a parser reads its text."""
    return yaml.safe_load(yaml_text([sky_task(request_of(load_job(SMALL, overrides), site, "sky", **options))], "t"))


def test_a_task_matches_sky_s_schema() -> None:
    gpus = ["run.device=auto", "layout.dp_shard=16", "batch.global_batch=32", "cluster.gpus_per_node=8"]
    task = task_of([*gpus, "cluster.gpu=a100-80gb"], volume="disk", image="registry.example/meshwright:1")
    assert not list(SCHEMA.iter_errors(task))
    assert task["num_nodes"] == 2 and task["volumes"] == {"/mnt/meshwright": "disk"}
    assert task["resources"] == {"accelerators": "A100-80GB:8", "image_id": "docker:registry.example/meshwright:1"}
    for name in list(task):
        task[f"{name}s"] = task.pop(name)
        assert list(SCHEMA.iter_errors(task)), f"{name}s instead of {name}"
        task[name] = task.pop(f"{name}s")
    assert list(SCHEMA.iter_errors({**task, "resources": {"accelerator": "H100:8"}}))


def test_what_a_task_needs() -> None:
    two = ["layout.dp_replicate=2", "cluster.gpus_per_node=1"]
    with pytest.raises(UserError, match="the pods need --volume, a volume for the run folder that all nodes share"):
        task_of(two)
    with pytest.raises(UserError, match=r"SkyPilot needs the name of the GPU; set cluster\.gpu"):
        task_of([*two, "run.device=auto"], volume="v")
    alone = task_of(["run.folder=a b"])
    assert "volumes" not in alone and "resources" not in alone
    assert "--set run.folder=\"$HOME\"/'a b' --nproc 1" in alone["run"]


def words_of(task: dict[str, Any], variables: dict[str, str], folder: Path) -> list[str]:
    """What a node's script starts: bash runs all of it, but `python`, which writes down its words."""
    (python := folder / "python").write_text('#!/bin/sh\nprintf "%s\\0" "$PWD" "$@" >"$HOME/words"\n')
    python.chmod(0o755)
    environment = {**task["envs"], **variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", task["run"]], env=environment, cwd=folder, check=True)
    place, *words = Path(variables["HOME"], "words").read_text().split("\0")[:-1]
    assert place in task["volumes"]
    return ["python", *words]


@pytest.mark.thorough
def test_the_nodes_train_and_resume(tmp_path: Path) -> None:
    (volume := tmp_path / "volume").mkdir()
    (site := tmp_path / "site.toml").write_text(f'gpus_per_node = 1\n[kubernetes]\nmount = "{volume}"\n')
    for attempt, steps in enumerate((2, 4)):
        overrides = ["layout.dp_replicate=2", f"run.steps={steps}", "run.folder=runs/two"]
        task = task_of(overrides, str(site), volume="disk")
        task["run"] = task["run"].replace(":29500", f":{free_port()}")
        with nodes(tmp_path) as machines:
            for rank in range(2):
                (home := tmp_path / f"home{rank}").mkdir(exist_ok=True)
                variables = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2", "HOME": str(home)}
                variables["SKYPILOT_NODE_IPS"] = "127.0.0.1\n127.0.0.1"
                machines.start(words_of(task, variables, tmp_path), {**task["envs"], **variables})
            assert machines.codes() == [0, 0], machines.output()
        rows = [json.loads(line) for line in (volume / "runs/two/metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))
        assert rows[-1]["attempt"] == attempt
