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
from meshwright.measure.loading import wait_share
from meshwright.measure.sweep import Sweep

TUNE = import_module("meshwright.measure.tune")  # the room gives this name to the function in it
SMALL = ["model.layers=1", "model.width=32", "batch.sequence_length=32", "batch.global_batch=4", "batch.micro_batch=1"]


def played(speeds: dict[str, float], loaders: dict[str, float] | None = None) -> Any:
    """Runs that take no time: a setting's speed is that of the first word it contains; none is out of memory.

    Loaders alone likewise, in samples per second; by default all are fast enough.
    """

    def measure(self: Sweep, setting: tuple[str, ...]) -> dict[str, Any]:
        words = " ".join(setting)
        if "--data" in self.arguments:
            rate = next((rate for word, rate in (loaders or {"": 1e9}).items() if word in words), 1e9)
            step_s = float(self.arguments[self.arguments.index("--step-time") + 1])
            share = wait_share(4 / rate, step_s, int(words.rpartition("workers=")[2]))
            return {"state": "measured", "result": {"samples_per_s": rate, "data_wait_share": share}}
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
    speeds = {"workers=1": 300.0, "workers": 200.0, "micro_batch=4": 150.0, "micro_batch": 120.0, "": 100.0}
    loaders = {"workers=0": 1.0, "workers=1": 1000.0}
    monkeypatch.setattr(Sweep, "_measure", played(speeds, loaders))
    found = tuned(tmp_path)
    assert found.before.tokens_per_s == 100.0 and found.after.tokens_per_s == 300.0
    assert "batch.micro_batch=4" in found.best and "data.workers=1" in found.best
    assert "+200.0% over the original job" in found.verdict
    assert len(found.tried) == 1 + 3 + 2 + 1


@pytest.mark.parametrize(
    ("loaders", "alone", "chosen"),
    [
        # 150 tokens/s are 4.7 sequences of 32 tokens per second: with a margin of 1.2 the step takes 5.6.
        ({"": 1e6}, 1, "data.workers=0"),  # its own process is fast enough
        ({"workers=0": 100.0, "workers=1": 5.0, "workers=2": 6.0}, 3, "data.workers=2"),  # the second has no margin
        ({"workers=4": 3.0, "workers=8": 2.0, "workers": 1.0}, 5, "data.workers=4"),  # none keeps up: the best of them
    ],
)
def test_a_loader_has_the_fewest_workers_that_keep_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaders: dict[str, float], alone: int, chosen: str
) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    monkeypatch.setattr(TUNE, "cores", lambda: 8)
    monkeypatch.setattr(Sweep, "_measure", played({"micro_batch=4": 150.0, "": 100.0}, loaders))
    found = tune(
        "demo", [*SMALL, "data.workers=7"], "CPU", 1, tmp_path / "runs.jsonl", best=3, arguments=(), report=print
    )
    rows = [one for one in found.tried if one.part == "loader alone"]
    assert len(rows) == alone and all(one.tokens_per_s is None for one in rows)
    assert found.tried[-1].part == "loader" and found.tried[-1].setting[-1] == chosen


def test_a_gpu_is_tried_with_pinned_memory_the_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    monkeypatch.setattr(Sweep, "_measure", played({"pin_memory=false": 400.0, "workers=0": 300.0, "": 100.0}))
    found = tuned(tmp_path, "NVIDIA H200")
    assert found.best[-2:] == ("data.workers=0", "data.pin_memory=false")
    assert load_job("demo", [*SMALL, *found.best]).job.data.pin_memory is False


def test_what_does_not_fit_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    monkeypatch.setattr(Sweep, "_measure", played({"micro_batch=4": 0.0, "micro_batch=2": 200.0, "": 100.0}))
    found = tuned(tmp_path)
    assert "batch.micro_batch=2" in found.best
    assert {one.state for one in found.tried} == {"measured", "out of memory"}


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_python")
def test_the_command_writes_a_job_with_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs on this CPU, one of each kind."""
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    monkeypatch.setattr(TUNE, "WORKERS", (0,))
    words = [word for override in SMALL for word in ("--set", override)]
    counts = ["--best", "1", "--steps", "1", "--warmup", "1"]
    files = ["--write", str(tmp_path / "tuned.toml"), "--out", str(tmp_path / "runs.jsonl")]
    done = CliRunner().invoke(app, ["tune", "demo", *words, *counts, *files, "--json"])
    report = json.loads(done.stdout)
    assert [one["state"] for one in report["tried"]] == ["measured"] * 4
    assert report["tried"][2]["part"] == "loader alone" and report["tried"][2]["samples_per_s"] > 0
    job = load_job(str(tmp_path / "tuned.toml")).job
    assert job.model.width == 32 and job == load_job("demo", [*SMALL, *report["best"]]).job


MEDIA = """
[model.vision]
image_size = 16
patch = 8
width = 16
heads = 2
[data]
sources = ["a.tar"]
[data.fields.image]
kind = "image"
[batch]
sequence_length = 32
global_batch = 4
micro_batch = 4
"""


def test_pictures_are_decoded_where_training_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path))
    (tmp_path / "job.toml").write_text(MEDIA)
    monkeypatch.setattr(Sweep, "_measure", played({"decode=gpu": 300.0, "decode=cpu": 200.0, "": 100.0}))
    file = tmp_path / "runs.jsonl"
    found = tune(str(tmp_path / "job.toml"), [], "NVIDIA H200", 1, file, best=1, arguments=(), report=print)
    assert "data.decode=gpu" in found.best
    on_cpu = tune(str(tmp_path / "job.toml"), [], "CPU", 1, tmp_path / "cpu", best=1, arguments=(), report=print)
    assert not any("decode" in " ".join(one.setting) for one in on_cpu.tried)
