"""Metrics read while they grow: the same numbers as the whole file gives, few enough to draw, no spike lost."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from studio_runs import make_run, metric

from meshwright.runs import RunFolder
from meshwright.studio import follow
from meshwright.studio.follow import Follower
from meshwright.studio.runs import Runs


def read(follower: Follower) -> None:
    follower.read(time.monotonic() + 60)


def drawn(follower: Follower, buckets: int = 10**6) -> list[tuple[float, float]]:
    curves = follower.drawn("step", buckets)
    return list(zip(curves["x"], curves["fields"]["loss"]["low"], strict=True))


def whole(run: RunFolder) -> list[tuple[float, Any]]:
    return [(row["step"], pytest.approx(row["loss"], rel=1e-5)) for row in run.metrics() if "loss" in row]


def test_only_new_lines_are_read_and_a_torn_one_waits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    follower = Follower(tmp_path, "run")
    read(follower)
    assert drawn(follower) == whole(run) and follower.read_share == 1.0
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metric(21)) + "\n" + '{"step": 22, "lo')
    read(follower)
    assert len(drawn(follower)) == 21 and follower.read_share == 1.0
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('ss": 1.5}\n')
    read(follower)
    assert drawn(follower)[-1] == (22, 1.5)
    (run.path / "metrics.jsonl").write_text(json.dumps(metric(1)) + "\n")
    read(follower)
    assert drawn(follower) == [(1, 8.0)]


def test_restarts_take_back_what_was_done_beyond_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=30)
    follower = Follower(tmp_path, "run")
    for attempt, first in ((1, 12), (2, 25), (3, 8)):
        read(follower)
        for step in range(first, 31):
            run.metric(metric(step, loss=step + attempt / 10, attempt=attempt))
        run.metric(metric(40, attempt=attempt - 1))  # one that was not told yet that it is over
    read(follower)
    assert drawn(follower) == whole(run)
    fresh = Follower(tmp_path, "run")
    read(fresh)
    assert drawn(fresh) == whole(run)


def test_a_restart_into_what_was_folded_is_still_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_BUCKETS", 20), ("_TAIL", 10), ("_MOST_ROWS", 50), ("_CHUNK", 3000)):
        monkeypatch.setattr(follow, name, value)
    run = make_run(tmp_path / "run", steps=300)
    follower = Follower(tmp_path, "run")
    read(follower)
    assert len(follower.drawn("step", 10**6)["x"]) < 100
    for step in range(101, 131):
        run.metric(metric(step, loss=50.0 + step, attempt=1))
    read(follower)
    curves = follower.drawn("step", 10**6)
    high = curves["fields"]["loss"].get("high", curves["fields"]["loss"]["low"])
    beyond = [loss for step, loss in zip(curves["x"], high, strict=True) if 100 < step <= 130]
    assert curves["x"][-1] == 130 and max(high) == 180.0 and min(beyond) > 50
    assert max(loss for step, loss in zip(curves["x"], high, strict=True) if step <= 100) <= 8.0


def test_a_long_run_is_few_points_with_its_spikes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    with (run.path / "metrics.jsonl").open("a") as file:
        for step in range(2, 20_001):
            loss: Any = 77.5 if step == 12_345 else "nan" if step == 50 else 2.0
            file.write(json.dumps({"step": step, "loss": loss, "tokens": 10 * step, "step_s": 0.5}) + "\n")
    follower = Follower(tmp_path, "run")
    read(follower)
    loss = follower.drawn("time", 300)
    assert len(loss["x"]) <= 600 and max(loss["fields"]["loss"]["high"]) == 77.5
    assert loss["x"][-1] == pytest.approx(10_000, rel=1e-3)
    assert follower.drawn("tokens", 300)["x"][-1] == 200_000


def test_the_mean_of_folded_rows_counts_every_step_once(tmp_path: Path) -> None:
    """However often they were folded before: what the page smooths is not the middle of lowest and highest."""
    run = make_run(tmp_path / "run", steps=0, ended=None)
    losses = [100.0 if step % 50 == 0 else 1.0 + step % 7 for step in range(9000)]
    follower = Follower(tmp_path, "run")
    for start in range(0, 9000, 1500):
        with (run.path / "metrics.jsonl").open("a") as file:
            for step in range(start, start + 1500):
                file.write(json.dumps(metric(step + 1, loss=losses[step])) + "\n")
        read(follower)
    curves = follower.drawn("step", 10)
    ends = [0, *map(int, curves["x"])]
    wanted = [sum(losses[a:b]) / (b - a) for a, b in pairwise(ends)]
    assert curves["fields"]["loss"]["mean"] == pytest.approx(wanted, rel=1e-4)
    assert ends[-1] == 9000 and min(curves["fields"]["loss"]["high"]) == 100.0


def test_reading_stops_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_CHUNK", 1000)
    make_run(tmp_path / "run", steps=100)
    follower = Follower(tmp_path, "run")
    follower.read(time.monotonic() - 1)
    assert 0 < follower.read_share < 1
    read(follower)
    assert follower.read_share == 1.0


def test_one_word_says_how_a_run_is(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for name, ended in (("a", "finished"), ("b", "interrupted"), ("c", "failed"), ("d", None), ("e", None)):
        make_run(tmp_path / name, steps=2, ended=ended)
    import os

    os.utime(tmp_path / "e" / "metrics.jsonl", (1, 1))
    (tmp_path / "not-a-run").mkdir()
    states = {line["name"]: line["state"] for line in runs.listed()}
    assert states == {"a": "done", "b": "stopped", "c": "failed", "d": "running", "e": "silent"}
    marks = runs.curves(["a"], "tokens")["a"]["marks"]
    assert marks == [{"kind": "checkpoint", "x": 8192.0}, {"kind": "stop", "x": 8192.0}]
