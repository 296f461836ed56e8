"""`run.may_shrink` from end to end: a rank is lost for good, and the run goes on without it."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import meshwright.launch.elastic
import meshwright.launch.worker
import meshwright.train.setup
from meshwright.checkpoint import newest
from meshwright.runs.folder import RunFolder
from meshwright.train import Trainer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fault_runs

STEPS, BATCH, FALLS_IN = 8, 12, 4
JOB = f"""
[model]
preset = "tiny-llama"
layers = 1
width = 32
heads = 2
kv_heads = 2
ffn_width = 32
[data]
sources = ["builtin:synthetic"]
workers = 0
[batch]
sequence_length = 16
global_batch = {BATCH}
micro_batch = 1
[schedule]
name = "constant"
[evaluation]
every_steps = 0
[checkpoint]
every_steps = 2
[run]
device = "cpu"
folder = "run"
steps = {STEPS}
max_restarts = 3
may_shrink = true
"""
REPLICAS, SHARDS = ["layout.dp_replicate=4"], ["layout.dp_shard=4", "layout.zero=3"]
TENSOR_PARALLEL = ["layout.tp=2", "layout.dp_shard=2", "batch.micro_batch=6"]


def lose_the_last_of(ranks: int = 4) -> None:
    """In a launcher, whose ranks are forked from it: of so many ranks the last dies in a step, and at once ever after.

    Every rank also writes down which samples it has taken; all compute in float64, so that layouts agree closely.
    """
    lost = ranks - 1
    worker, setup, trainer = meshwright.launch.worker, meshwright.train.setup, Trainer
    step_of, meet, build = trainer.step, worker.join_world, setup.build

    def hurt(rank: int, size: int) -> None:
        if (rank, size) == (lost, ranks):
            while not list(Path("run/checkpoints").glob("step-*")):  # saved beside the training
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def step(training: Any, number: int, *given: Any) -> bool:
        if number == FALLS_IN:
            hurt(training.world.rank, training.world.size)
        accumulate = training.engine.accumulate

        def watched(data: Any, *rest: Any) -> Any:
            with Path(f"seen-{training.attempt}-{training.world.rank}").open("a") as file:
                file.write(json.dumps({"step": number, "samples": data.batch.sample_ids_B.tolist()}) + "\n")
            return accumulate(data, *rest)

        training.engine.accumulate = watched
        try:
            return step_of(training, number, *given)
        finally:
            training.engine.accumulate = accumulate

    def join(*given: Any) -> Any:
        if Path("run/checkpoints").is_dir():
            hurt(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return meet(*given)

    vars(worker)["join_world"] = join
    vars(setup)["build"] = lambda job, world, dtype: build(job, world, torch.float64)
    setattr(trainer, "step", step)  # noqa: B010


class Run:
    """A run in a folder of its own; its commands are given in forks of this process."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder, self.settings = folder, settings
        folder.mkdir()
        (folder / "job.toml").write_text(JOB)

    def train(self, nproc: int, *words: str, prepare: Callable[[], None] = lose_the_last_of) -> int:
        sets = [word for setting in self.settings for word in ("--set", setting)]
        return self.give("train", "job.toml", *sets, "--nproc", str(nproc), *words, prepare=prepare)

    def give(self, *words: str, prepare: Callable[[], None] = lambda: None) -> int:
        def main() -> None:
            prepare()
            fault_runs.command(list(words))

        with (self.folder / "out").open("a") as out, (self.folder / "err").open("a") as err:
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(fault_runs.ROOT)}
            return fault_runs.Forked(main, variables, out, err, self.folder).wait(120.0)

    @property
    def record(self) -> RunFolder:
        return RunFolder.open(self.folder / "run")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.record.events() if event["kind"] == kind]

    def numbers(self) -> dict[int, tuple[float, float]]:
        return {row["step"]: (row["loss"], row["grad_norm"]) for row in self.record.metrics() if "loss" in row}

    def samples(self) -> list[int]:
        """What the steps that count were made of: of those made twice, the later."""
        attempts = {row["step"]: row["attempt"] for row in self.record.metrics() if "loss" in row}
        found = []
        for path in self.folder.glob("seen-*"):
            attempt, rank = map(int, path.name.split("-")[1:])
            layout = self.record.attempt(attempt)["job"]["layout"]
            for row in map(json.loads, path.read_text().splitlines()):
                if attempts[row["step"]] == attempt and rank % layout["tp"] == 0:
                    found += row["samples"]
        return sorted(found)

    def told(self) -> str:
        return (self.folder / "out").read_text() + (self.folder / "err").read_text()


def assert_same(run: Run, quiet: Run) -> None:
    """The parity bound of float64, of every step's loss and gradient norm; and the same samples, each once."""
    ours, others = run.numbers(), quiet.numbers()
    assert sorted(ours) == sorted(others) == list(range(1, STEPS + 1))
    for step, pair in others.items():
        assert ours[step] == pytest.approx(pair, rel=1e-9), step
    assert run.samples() == quiet.samples() == list(range(STEPS * BATCH))
    facts = newest(run.folder / "run").facts
    assert (facts.step, facts.position) == (STEPS, STEPS * BATCH)
    assert fault_runs.processes_of(run.folder) == []


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four ranks that nothing happens to."""
    torch.set_num_threads(1)
    run = Run(tmp_path_factory.mktemp("quiet") / "here", *REPLICAS)
    assert run.train(4, prepare=lambda: lose_the_last_of(5)) == 0, run.told()
    return run


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory, quiet: Run) -> Run:
    """A run that loses a rank and finishes."""
    run = Run(tmp_path_factory.mktemp("shrunk") / "here", *REPLICAS)
    assert run.train(4) == 0, run.told()
    return run


@pytest.mark.thorough
def test_it_goes_on_with_fewer_ranks_to_the_same_numbers(shrunk: Run, quiet: Run) -> None:
    assert shrunk.record.state() == "done"
    assert_same(shrunk, quiet)


@pytest.mark.thorough
def test_every_restart_says_its_cause_and_how_many_ranks_go_on(shrunk: Run) -> None:
    restarts = shrunk.events("restart")
    assert [(event["rank"], event["ranks"], event["step"]) for event in restarts] == [(3, 4, 3), (3, 3, 3)]
    assert all("rank 3 was killed by SIGKILL" in event["cause"] for event in restarts)
    assert "restart 2 of 3 on 3 ranks in 1 s: rank 3 was killed by SIGKILL" in shrunk.told()
    [resumed] = shrunk.events("resume")
    assert resumed["step"] == 2 and resumed["path"] == "checkpoints/step-00000002"
    assert resumed["changed"] == {"layout.dp_replicate": [4, 3]}


@pytest.mark.thorough
def test_the_folder_says_what_layout_each_attempt_had(shrunk: Run) -> None:
    assert [shrunk.record.attempt(number)["job"]["layout"]["dp_replicate"] for number in range(2)] == [4, 3]
    assert shrunk.record.job()["layout"]["dp_replicate"] == 3
    assert {row["step"]: row["attempt"] for row in shrunk.record.metrics()} == {
        1: 0,
        2: 0,
        **dict.fromkeys(range(3, 9), 1),
    }


@pytest.mark.thorough
def test_status_and_report_speak_of_it_as_of_any_other(shrunk: Run) -> None:
    (shrunk.folder / "run/report.html").unlink()
    assert shrunk.give("report", "run") == 0 and (shrunk.folder / "run/report.html").is_file(), shrunk.told()
    assert shrunk.give("status", "run", "--json") == 0
    told = json.loads((shrunk.folder / "out").read_text().rpartition("run/report.html\n")[2])
    assert told["state"] == "done" and told["step"] == STEPS and told["attempt"] == 1


@pytest.mark.thorough
def test_tensor_parallel_ranks_stay_together(tmp_path: Path, quiet: Run) -> None:
    run = Run(tmp_path / "here", *TENSOR_PARALLEL)
    assert run.train(4) == 0, run.told()
    assert [event["ranks"] for event in run.events("restart")] == [4, 2]
    assert [run.record.attempt(number)["job"]["layout"]["tp"] for number in range(2)] == [2, 2]
    assert_same(run, quiet)


@pytest.mark.thorough
def test_once_the_lost_rank_is_back_the_job_as_it_was_written_goes_on(tmp_path: Path, quiet: Run) -> None:
    run = Run(tmp_path / "here", *SHARDS)
    assert run.train(4, "--set", "run.steps=6") == 0, run.told()
    assert [event["ranks"] for event in run.events("restart")] == [4, 3]
    assert run.train(4, "--resume", prepare=lambda: lose_the_last_of(5)) == 0, run.told()
    resumed = run.events("resume")[-1]
    assert resumed["step"] == 6 and resumed["changed"] == {"layout.dp_shard": [3, 4], "run.steps": [6, STEPS]}
    assert_same(run, quiet)


@pytest.mark.thorough
def test_where_it_may_not_shrink_the_restarts_run_out(tmp_path: Path) -> None:
    run = Run(tmp_path / "here", *REPLICAS, "run.may_shrink=false", "run.max_restarts=1")
    assert run.train(4) == 1
    [sentence] = (run.folder / "err").read_text().splitlines()
    assert "rank 3 was killed by SIGKILL" in sentence
    assert [(event["ranks"], event["rank"]) for event in run.events("restart")] == [(4, 3)]
    assert run.record.state() == "failed" and max(run.numbers()) == 3
    assert fault_runs.processes_of(run.folder) == []


def test_ranks_are_started_without_the_gpu_that_is_left_out(
    cli, tiny_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher alone, on a machine that says it has GPUs."""
    started = []

    def fails(_job: Any, run: Path, nproc: int, *_: Any, variables: dict[str, str], **__: Any) -> None:
        started.append((nproc, variables.get("CUDA_VISIBLE_DEVICES")))
        pid = 2**30  # nobody's
        raise ChildFailedError("a rank", {1: ProcessFailure(1, pid, -9, str(run / "logs/rank-1.error.json"))})

    monkeypatch.setattr(meshwright.launch.elastic, "run_agent", fails)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("meshwright.launch.restarts.FIRST_WAIT_S", 0.0)
    settings = ["run.device=auto", "layout.dp_replicate=4", "batch.global_batch=12", "batch.micro_batch=1"]
    settings += ["run.max_restarts=2", "run.may_shrink=true"]
    result = cli("train", "job.toml", "--nproc", "4", *(word for one in settings for word in ("--set", one)))
    assert result.code == 1 and "rank 1 was killed by SIGKILL" in result.err, result
    assert started == [(4, None), (4, None), (3, "0,2,3")]
