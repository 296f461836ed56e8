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
    assert [(words[0]["loss"], named["step"]) for words, named in calls.of("log")] == [
        (row["loss"], row["step"]) for row in rows
    ]
    assert calls.of("save") and calls.of("finish") == [((), {"exit_code": 0})]


def test_mlflow_gets_the_rows_and_what_the_attempt_ran(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    fake(monkeypatch, "mlflow", calls)
    rows = train('log.sinks=["mlflow"]')
    ((words, _),) = calls.of("log_params")
    assert words[0]["run.steps"] == "3" and str(here / "run/mlflow") in calls.of("set_tracking_uri")[0][0][0]
    assert [words[0]["loss"] for words, _ in calls.of("log_metrics")] == [row["loss"] for row in rows]
    assert "attempts/0.json" in calls.of("log_artifact")[0][0][0] and calls.of("end_run") == [(("FINISHED",), {})]


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


def test_the_real_wandb_writes_offline_without_a_network(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    train('log.sinks=["wandb"]')
    assert list((here / "run/wandb").glob("offline-run-*/*.wandb"))
    assert not [event for event in RunFolder.open(Path("run")).events() if event["kind"] == "sink_failed"]


def test_the_real_mlflow_keeps_a_run_in_the_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    rows = train('log.sinks=["mlflow"]')
    assert not [event for event in RunFolder.open(Path("run")).events() if event["kind"] == "sink_failed"]
    (run,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("meshwright").experiment_id])
    assert run.data.metrics["loss"] == pytest.approx(rows[-1]["loss"]) and run.data.params["run.steps"] == "3"
