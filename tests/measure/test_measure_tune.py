"""Tuning: what the planner proposes is run, what does not fit is halved, and the fastest is written as a job."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.job import load_job
from meshwright.measure import tune
from meshwright.measure.sweep import Sweep

SMALL = ["model.layers=1", "model.width=32", "batch.sequence_length=32", "batch.global_batch=4", "batch.micro_batch=1"]


def played(speeds: dict[str, float]) -> Any:
    """Runs that take no time: a setting's speed is that of the first word it contains; none is out of memory."""

    def measure(self: Sweep, setting: tuple[str, ...]) -> dict[str, Any]:
        words = " ".join(setting)
        for word, speed in speeds.items():
            if word in words:
                if not speed:
                    return {"state": "out of memory", "why": "no room"}
                return {"state": "measured", "result": {"tokens_per_s": speed, "mfu": None, "peak_memory_bytes": 1}}
        raise AssertionError(words)

    return measure


def tuned(tmp_path: Path, device: str = "CPU") -> Any:
    file = tmp_path / "runs.jsonl"
    return tune("demo", SMALL, device, 1, file, best=3, arguments=(), report=lambda one: None)


def test_the_fastest_of_what_was_run_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    speeds = {"workers=4": 300.0, "workers": 200.0, "micro_batch=4": 150.0, "micro_batch": 120.0, "": 100.0}
    monkeypatch.setattr(Sweep, "_measure", played(speeds))
    found = tuned(tmp_path)
    assert found.before.tokens_per_s == 100.0 and found.after.tokens_per_s == 300.0
    assert "batch.micro_batch=4" in found.best and "data.workers=4" in found.best
    assert "+200.0% over the original job" in found.verdict
    assert len(found.tried) == 1 + 3 + 3


def test_a_gpu_is_tried_with_pinned_memory_the_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    monkeypatch.setattr(Sweep, "_measure", played({"pin_memory=false": 400.0, "workers=2": 300.0, "": 100.0}))
    found = tuned(tmp_path, "NVIDIA H200")
    assert found.best[-3:] == ("data.workers=2", "data.prefetch=2", "data.pin_memory=false")
    assert load_job("demo", [*SMALL, *found.best]).job.data.pin_memory is False


def test_what_does_not_fit_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    monkeypatch.setattr(Sweep, "_measure", played({"micro_batch=4": 0.0, "micro_batch=2": 200.0, "": 100.0}))
    found = tuned(tmp_path)
    assert "batch.micro_batch=2" in found.best
    assert {one.state for one in found.tried} == {"measured", "out of memory"}


def test_the_command_writes_a_job_with_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs on this CPU, one of each kind."""
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    monkeypatch.setattr(import_module("meshwright.measure.tune"), "LOADERS", ((0, 2),))
    words = [word for override in SMALL for word in ("--set", override)]
    counts = ["--best", "1", "--steps", "1", "--warmup", "1"]
    files = ["--write", str(tmp_path / "tuned.toml"), "--out", str(tmp_path / "runs.jsonl")]
    done = CliRunner().invoke(app, ["tune", "demo", *words, *counts, *files, "--json"])
    report = json.loads(done.stdout)
    assert [one["state"] for one in report["tried"]] == ["measured"] * 3
    job = load_job(str(tmp_path / "tuned.toml")).job
    assert job.model.width == 32 and job == load_job("demo", [*SMALL, *report["best"]]).job
