"""Run folders of strangers: one line costs that line, is counted and told, and takes no memory worth the name."""

import json
import math
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from counting import counted_calls
from studio_runs import make_run, metric
from test_studio_attacks import ask

from meshwright.errors import UserError
from meshwright.runs import RunFolder
from meshwright.studio import Studio, write_report
from meshwright.studio.expectations import expectations
from meshwright.studio.follow import Follower
from meshwright.studio.memory import memory_chart
from meshwright.studio.runs import Runs

MEMORY: dict[str, Any] = {
    "step": 1,
    "at": "start",
    "micro_batch": None,
    "layer": None,
    "rank": 0,
    "host_bytes": 0,
    "elapsed_s": 0.0,
    **{f"{kind}_bytes": 4096 for kind in ("parameters", "gradients", "optimizer", "activations", "other")},
}
BAD_LINES = {
    "nested": b"[" * 3000 + b"]" * 3000,
    "nested in a field": b'{"kind": "start", "step": 1, "x": ' + b"[" * 500 + b"]" * 500 + b"}",
    "huge number": b'{"kind": "start", "step": ' + b"9" * 400 + b"}",
    "more digits than Python reads": b'{"kind": "start", "step": ' + b"9" * 5000 + b"}",
    "list for a word": b'{"kind": ["start"], "step": [1], "loss": [2]}',
    "over a MiB": b'{"kind": "start", "step": 1, "x": "' + b"a" * (1 << 20) + b'"}',
    "many MiB": b'{"kind": "start", "step": 1, "x": "' + b"a" * (3 << 20) + b'"}',
    "not UTF-8": b'{"kind": "\xff\xfe", "step": 1}',
    "half a character": b'{"kind": "\\ud800", "step": "\\ud800"}',
    "a constant": b'{"kind": "start", "step": NaN, "elapsed_s": NaN}',
    "no object": b'"start"',
}


@contextmanager
def served(root: Path) -> Iterator[Studio]:
    server = Studio(root)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.close()


def put_in_the_middle(path: Path, line: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line + b"\n", *lines[1:]]))


@pytest.mark.thorough
@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "memory.jsonl"])
def test_a_bad_line_costs_that_line_and_is_told(tmp_path: Path, name: str, line: bytes) -> None:
    run = make_run(tmp_path / "run", steps=3)
    for step in (1, 2):
        run.memory(MEMORY | {"step": step})
    make_run(tmp_path / "other", steps=2)
    put_in_the_middle(run.path / name, line)
    html = write_report(run.path).read_text()
    assert f"one line of {name} cannot be read and is left out (line 2" in html
    assert ">finished<" in html and "step 3 of 3" in html and "Memory in the first steps" in html
    with served(tmp_path) as server:
        curves = json.loads(ask(server, "/api/curves?run=run")[2])["runs"]["run"]
        assert curves["x"] == [1, 2, 3] and curves["read"] == 1
        listed = {one["name"]: one for one in json.loads(ask(server, "/api/runs")[2])["runs"]}
        assert listed["run"]["state"] == listed["other"]["state"] == "done" and listed["run"]["step"] == 3
        assert listed["run"]["unread"] == (0 if name == "memory.jsonl" else 1)
        shown = json.loads(ask(server, "/api/run?run=run")[2])
        assert [told.partition(" cannot")[0] for told in shown["unread"]] == [f"one line of {name}"]
        assert shown["memory"] and len(shown["events"]) == 3


@pytest.mark.parametrize("fields", [{"step": 60_000_000}, {"at": "{layer:300000000}"}, {"step": 2**53 - 1}])
def test_no_line_of_the_memory_curve_is_a_size_or_a_format(tmp_path: Path, fields: dict[str, Any]) -> None:
    rows = [MEMORY, MEMORY | fields]
    tracemalloc.start()
    try:
        figure = memory_chart(rows)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert len(figure) < 20_000 and str(fields.get("at", "")) in figure


def test_steps_that_go_back_are_drawn_too() -> None:
    assert "Memory in the first steps" in memory_chart([MEMORY | {"step": step} for step in (3, 4, 1)])


def test_a_run_of_only_bad_lines_is_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    for name in ("metrics.jsonl", "events.jsonl", "memory.jsonl"):
        (run.path / name).write_bytes(b"\xff\n" * 7)
    html = write_report(run.path).read_text()
    assert html.count("7 lines of ") == 3
    listed = Runs(tmp_path).listed()
    assert [(one["name"], one["unread"], one["step"]) for one in listed] == [("run", 7, None)]


@pytest.mark.parametrize("name", ["job.resolved.json", "environment.json", "code.json", "metrics.jsonl", "job.toml"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/hostname")])
def test_what_is_no_plain_file_is_neither_waited_for_nor_followed(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    run = make_run(tmp_path / "run", steps=2)
    (run.path / name).unlink()
    make(run.path / name)
    with pytest.raises(UserError, match=r"(is damaged|is not a run folder)"):
        write_report(run.path)
    assert len(Runs(tmp_path).listed()) == (0 if name == "job.resolved.json" else 1)


def test_a_report_replaces_links_and_pipes_of_a_run_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    own = tmp_path / "mine.txt"
    own.write_text("mine")
    (run.path / ".report.html.new").symlink_to(own)
    os.mkfifo(run.path / "report.html")
    assert "<html" in write_report(run.path).read_text()
    assert own.read_text() == "mine", "a page on its way has a name that nobody can guess"


@pytest.mark.thorough
def test_a_very_long_run_is_read_in_bounded_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    steps = 40_000
    with (run.path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = "nan" if step == 30_000 else 99.5 if step == 21_234 else 2.0
            file.write(json.dumps(metric(step, loss=loss, step_s=0.5)) + "\n")
    folder = RunFolder.open(run.path)
    numbers = folder.numbers()
    assert len(numbers.rows) <= 1 << 14 and numbers.sums == (steps, steps / 2, 1, 30_000)
    assert max(row["loss"] for row in numbers.rows if row["loss"] == row["loss"]) == 99.5
    assert any(row["step"] == 30_000 for row in numbers.rows) and numbers.rows[-1]["step"] == steps
    assert "one step without a finite loss, the first at step 30,000" in write_report(run.path).read_text()


def test_a_restart_takes_back_what_a_long_run_made(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    with (run.path / "metrics.jsonl").open("w") as file:
        for attempt, first, last in ((0, 1, 30_000), (1, 20_001, 40_000)):
            for step in range(first, last + 1):
                file.write(json.dumps({"step": step, "loss": float(attempt), "step_s": 1.0, "attempt": attempt}) + "\n")
    numbers = RunFolder.open(run.path).numbers()
    assert all(row["attempt"] == (row["step"] > 20_000) for row in numbers.rows)
    assert numbers.sums.seconds == pytest.approx(40_000, abs=20)


def test_attempts_by_the_thousand_do_not_have_all_read_again_and_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    with (run.path / "metrics.jsonl").open("w") as file:
        for step in range(1, 6001):
            file.write(json.dumps({"step": step, "loss": 1.0, "attempt": 0}) + "\n")
        for attempt in range(1, 400):
            file.write(json.dumps({"step": 400 - attempt, "loss": 1.0, "attempt": attempt}) + "\n")
    follower = Follower(tmp_path, "run")
    with counted_calls() as calls:
        follower.read(math.inf)
    assert follower.read_share == 1.0 and calls.count < 4_000_000, calls


def test_a_clock_that_is_set_calls_no_live_run_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", steps=2, ended=None)
    runs, year = Runs(tmp_path), 365 * 86400.0
    real = time.time
    assert runs.listed()[0]["state"] == "running"
    for jump in (year, -year, 10 * year):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        run.metric(metric(3))
        assert runs.listed()[0]["state"] == "running"
        run.event("checkpoint", step=3)
        assert "running" in write_report(run.path).read_text() or jump > 0
    assert all(0 <= event["elapsed_s"] < 86400 for event in run.events())
    os.utime(run.path / "metrics.jsonl", (real() + year, real() + year))  # of a file server whose clock is ahead
    monkeypatch.setattr(time, "time", real)
    assert Runs(tmp_path).listed()[0]["state"] == "running"


@pytest.mark.parametrize("section", [{"model": {"layers": 10**9}}, {"layout": {"pp": 4096}, "model": {"layers": 4096}}])
def test_a_job_that_nobody_could_run_is_not_predicted(section: dict[str, Any]) -> None:
    start = {"kind": "start", "device": "NVIDIA H100 80GB HBM3", "ranks": section.get("layout", {}).get("pp", 1)}
    job = {"batch": {"global_batch": 64, "micro_batch": 1}, **section}
    with counted_calls() as calls:
        assert expectations(job, [metric(step) for step in range(1, 5)], [start]) == ""
    assert calls.count < 4_000_000, calls


def test_times_of_other_centuries_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    with (run.path / "events.jsonl").open("a") as file:
        for stamp, after in (("0001-01-01T00:00:00+00:00", -1e12), ("9999-12-31T23:59:59+00:00", 1e299), ("x", 0)):
            file.write(json.dumps({"kind": "stop", "time": stamp, "elapsed_s": after, "reason": "finished"}) + "\n")
    environment = json.loads((run.path / "environment.json").read_text())
    (run.path / "environment.json").write_text(json.dumps(environment | {"time": "yesterday"}))
    assert "at an unknown time" in write_report(run.path).read_text()
