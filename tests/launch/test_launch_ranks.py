"""A rank finds its place, trains its part, and learns of rank 0's refusals."""

import json
import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from meshwright import parallel
from meshwright.checkpoint import newest
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.devices import require_devices, with_own_device
from meshwright.launch.worker import run_job
from meshwright.ranks import Place, find_place, first_host, is_first_rank, slurm_variables
from meshwright.verify.ranks import run_ranks

STEP = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08,12],login1",
}


def test_torchrun_and_srun_tell_a_rank_its_place() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_place(torchrun) == Place(rank=3, size=4, local_rank=1, local_size=2)
    variables = slurm_variables(STEP)
    assert variables["MASTER_ADDR"] == "gpu07" and 15_000 <= int(variables["MASTER_PORT"]) < 31_000
    assert find_place({**STEP, **variables}) == Place(rank=5, size=8, local_rank=1, local_size=None)


def test_a_process_alone_is_no_rank() -> None:
    assert find_place({}) is None
    assert find_place({"RANK": "0", "WORLD_SIZE": "1"}) is None
    batch_script = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    assert slurm_variables(batch_script) == {}
    assert slurm_variables({**STEP, "SLURM_NTASKS": "1"}) == {}
    assert slurm_variables({**STEP, "RANK": "0"}) == {}, "torchrun inside a Slurm step speaks for itself"
    assert slurm_variables({**STEP, "SLURM_STEP_ID": "3"})["MASTER_PORT"] != slurm_variables(STEP)["MASTER_PORT"]


def test_a_batch_script_of_many_tasks_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has Slurm's variables of a rank, but no step: it is alone in the world it joins, too."""
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_NODELIST"):
        monkeypatch.setenv(name, {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}[name])
    assert parallel.join_world(load_job("demo").job, torch.device("cpu")).size == 1 and is_first_rank()


def test_one_of_srun_s_ranks_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert not is_first_rank()
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert is_first_rank()


def test_half_of_the_variables_is_refused() -> None:
    with pytest.raises(UserError, match="LOCAL_RANK"):
        find_place({"RANK": "0", "WORLD_SIZE": "2"})


def test_processes_without_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job("demo", ["run.device=cpu"]).job
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    require_devices(job, 128)
    with pytest.raises(UserError, match=r"129 ranks on this machine are too many .* start at most 128"):
        require_devices(job, 129)


def test_every_rank_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job("demo").job
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_devices(job, 2)
    with pytest.raises(UserError, match="3 ranks on this machine need as many GPUs, but it has 2"):
        require_devices(job, 3)
    require_devices(load_job("demo", ["run.device=cpu"]).job, 3)
    assert with_own_device(job, Place(1, 2, 1, 2)).run.device == "cuda:1"
    with pytest.raises(UserError, match="LOCAL_RANK = 2 has no GPU of its own on this machine, which has 2;"):
        with_own_device(job, Place(2, 4, 2, None))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert with_own_device(job, Place(3, 4, 3, None)).run.device == "cuda:0", "bound by the scheduler"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert with_own_device(job, Place(1, 2, 1, 2)).run.device == "auto"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node7", "node7"), ("a,b", "a"), ("n[1-4]", "n1"), ("n[003,9],m", "n003"), ("r[1-2]n[05-06].x,q[1]", "r1n05.x")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def _train(*overrides: str) -> tuple[str, int]:
    place = find_place(os.environ)
    assert place is not None
    finished = run_job(load_job("job.toml", overrides), Console(quiet=True), place)
    return finished.outcome.reason, finished.outcome.step


@pytest.mark.thorough
def test_ranks_that_something_else_started_train_what_one_process_trains(
    tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["data.cache=cache", "optimizer.eps=1e-3", "batch.micro_batch=1"]
    run_job(load_job("job.toml", [*settings, "run.folder=alone"]), Console(quiet=True))
    layout = ["layout.dp_shard=2", "layout.zero=2", "layout.tp=2"]
    assert run_ranks(_train, 4, *settings, *layout) == [("finished", 10)] * 4
    alone, ranks = (newest(Path(folder)) for folder in ("alone", "run"))
    assert alone.names("model/") == sorted(ranks.names("model/"), key=alone.names().index)
    for name in alone.names("model/"):
        own, other = ranks.whole(name), alone.whole(name)
        torch.testing.assert_close(own, other, rtol=0, atol=2e-4, msg=partial("{} {}".format, name))
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["links", "start", "checkpoint", "stop"]
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 13, "one rank records, the others are silent"


def _refusal(*overrides: str) -> str:
    try:
        _train(*overrides)
    except UserError as error:
        return str(error)
    return "no refusal"


def test_what_rank_0_refuses_every_rank_refuses(
    tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run_ranks(_refusal, 2, "layout.dp_replicate=2", "run.folder=corpus", "data.cache=cache")
    assert told[0] == told[1] and "run.folder" in told[0]
    assert "layout" in run_ranks(_refusal, 2, "data.cache=cache")[1], "two ranks for a layout of one"


def test_data_workers_are_forked_before_there_are_weights_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[int] = []

    def build(*given: Any) -> Any:
        workers.append(len(multiprocessing.active_children()))
        return parallel.build(*given)

    monkeypatch.setattr("meshwright.train.setup.build", build)
    small = ["run.steps=1", "batch.global_batch=2", "batch.micro_batch=2", "evaluation.every_steps=0", "data.workers=2"]
    small += ['data.sources=["builtin:synthetic"]', f"run.folder={tmp_path / 'run'}"]
    run_job(load_job("demo", small), Console(quiet=True))
    assert workers == [2] and not multiprocessing.active_children()
