"""Every attempt says what it ran, in the run folder and wherever log.sinks sends it."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.runs import RunFolder

SHORT = ["run.steps=3", "evaluation.every_steps=0", "data.cache=cache", "run.folder=run"]


class Calls(list):
    """Remembers every call of anything of it."""

    @property
    def summary(self) -> dict:
        return {}

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any, **named: Any) -> Any:
            self.append((name, words, named))
            return self

        return call

    def of(self, name: str) -> list[tuple]:
        return [(words, named) for called, words, named in self if called == name]


def fake(monkeypatch: pytest.MonkeyPatch, name: str, calls: Any) -> None:
    module = ModuleType(name)
    module.__getattr__ = lambda attribute: getattr(calls, attribute)
    module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, name, module)


def train(*settings: str, resume: bool = False) -> list[dict]:
    run_job(load_job("run" if resume else "job.toml", [*SHORT, *settings]), Console(quiet=True), resume=resume)
    return RunFolder.open(Path("run")).metrics()


@pytest.fixture
def here(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tiny_job.parent)
    return tiny_job.parent


def test_every_attempt_is_described(here: Path) -> None:
    train()
    train("run.steps=5", resume=True)
    first, second = (json.loads((here / f"run/attempts/{number}.json").read_text()) for number in (0, 1))
    assert (first["job"]["run"]["steps"], second["job"]["run"]["steps"]) == (3, 5)
    assert first["packages"]["torch"] and first["environment"]["memory_bytes"] > 1e8
    assert first["code"]["meshwright"] and second["attempt"] == 1


def test_a_sink_whose_package_is_missing_is_refused_by_name(cli, tiny_job: Path, monkeypatch) -> None:
    monkeypatch.setattr("meshwright.runs.sinks.find_spec", lambda name: None)
    refused = cli("train", "job.toml", "--set", 'log.sinks=["mlflow"]', *(w for s in SHORT for w in ("--set", s)))
    assert refused.code == 2 and refused.err.count("\n") == 1, refused
    assert 'log.sinks has "mlflow", which is not installed; pip install mlflow' in refused.err
    assert not (tiny_job.parent / "run").exists()


def test_wandb_gets_the_rows_and_what_the_attempt_ran_offline(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    fake(monkeypatch, "wandb", calls)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    rows = train('log.sinks=["wandb"]')
    ((_, init),) = calls.of("init")
    assert init["mode"] == "offline" and init["config"]["run"]["steps"] == 3 and init["config"]["attempt"] == 0
    assert init["config"]["code"]["meshwright"] and init["config"]["environment"]["python"]
    assert [(words[0]["loss"], words[0]["step"]) for words, _ in calls.of("log")] == [
        (row["loss"], row["step"]) for row in rows
    ]
    assert calls.of("save") and calls.of("finish") == [((), {"exit_code": 0})]


class Mlflow(Calls):
    """A tracking server: runs with tags, and parameters that may not change."""

    def __init__(self) -> None:
        self.runs: list[Any] = []

    def search_runs(self, experiments: list, tag: str, **_: Any) -> list[Any]:
        return [run for run in self.runs if tag == f"tags.`meshwright.run` = '{run.tags['meshwright.run']}'"]

    def start_run(self, run_id: str | None = None, run_name: str = "", tags: dict | None = None) -> Any:
        if run_id is None:
            data, info = SimpleNamespace(params={}), SimpleNamespace(run_id=str(len(self.runs)))
            self.runs.append(SimpleNamespace(name=run_name, tags=tags, info=info, data=data))
        self.run = self.runs[int(run_id or -1)]
        return self.run

    def log_params(self, params: dict[str, str]) -> None:
        assert not params.keys() & self.run.data.params.keys()
        self.run.data.params.update(params)


def test_mlflow_gets_the_rows_and_what_the_attempt_ran(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow()
    fake(monkeypatch, "mlflow", mlflow)
    rows = train('log.sinks=["mlflow"]')
    assert mlflow.runs[0].data.params["run.steps"] == "3"
    assert str(here / "run/mlflow") in mlflow.of("set_tracking_uri")[0][0][0]
    assert [words[0]["loss"] for words, _ in mlflow.of("log_metrics")] == [row["loss"] for row in rows]
    assert "attempts/0.json" in mlflow.of("log_artifact")[0][0][0] and mlflow.of("end_run") == [(("FINISHED",), {})]


@pytest.mark.thorough
def test_a_resumed_run_continues_its_run_in_mlflow(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow()
    fake(monkeypatch, "mlflow", mlflow)
    train('log.sinks=["mlflow"]')
    train("run.steps=5", resume=True)
    train('log.sinks=["mlflow"]', "run.folder=other")
    assert [run.name for run in mlflow.runs] == ["run", "other"]
    assert [named["step"] for _, named in mlflow.of("log_metrics")][3:5] == [4, 5]
    assert not [event for event in RunFolder.open(Path("run")).events() if event["kind"] == "sink_failed"]


def test_a_sink_that_breaks_does_not_end_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Calls):
        def log(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("no such host")

    fake(monkeypatch, "wandb", Broken())
    assert len(train('log.sinks=["wandb"]')) == 3
    failed = [event for event in RunFolder.open(Path("run")).events() if event["kind"] == "sink_failed"]
    assert [event["error"] for event in failed] == ["ConnectionError: no such host"]


def test_the_real_tensorboard_reads_back_what_was_written(here: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = train('log.sinks=["tensorboard"]')
    read = EventAccumulator(str(here / "run/tensorboard"))
    read.Reload()
    assert [scalar.value for scalar in read.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])
    assert any(tag.startswith("attempt") for tag in read.Tags()["tensors"])


@pytest.mark.thorough
def test_a_resumed_run_continues_its_run_in_wandb(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    fake(monkeypatch, "wandb", calls)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    train('log.sinks=["wandb"]')
    (here / "run").rename(here / "moved")
    run_job(load_job("moved", ["run.steps=4"]), Console(quiet=True), resume=True)
    train('log.sinks=["wandb"]')
    first, resumed, other = (named for _, named in calls.of("init"))
    assert first["id"] == resumed["id"] != other["id"]
    assert first["resume"] == resumed["resume"] == "allow"


def test_the_real_wandb_writes_offline_and_resumes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    train('log.sinks=["wandb"]')
    train("run.steps=5", resume=True)
    first, second = sorted((here / "run/wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name == f"run-{RunFolder.open(Path('run')).id()}.wandb"
    assert not [event for event in RunFolder.open(Path("run")).events() if event["kind"] == "sink_failed"]


def test_the_real_mlflow_continues_a_run_whose_job_changed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    train('log.sinks=["mlflow"]')
    rows = train("run.steps=5", resume=True)
    assert not [event for event in RunFolder.open(Path("run")).events() if event["kind"] == "sink_failed"]
    (run,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("meshwright").experiment_id])
    assert run.data.metrics["loss"] == pytest.approx(rows[-1]["loss"]) and run.data.params["run.steps"] == "3"
    assert run.info.status == "FINISHED"
