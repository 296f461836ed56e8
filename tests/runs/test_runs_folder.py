"""The run folder: complete when made, nothing when not, every line out at once, readable while torn."""

import errno
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from meshwright.errors import UserError
from meshwright.runs import RunFolder
from meshwright.runs.lifecycle import record_failure

JOB = {"model": {"width": 64}, "run": {"steps": 3, "folder": None}}

MEMORY_ROW = {"step": 2, "rank": 0, "host_bytes": 9, "at": "backward", "layer": None, "micro_batch": 0}
MEMORY_ROW |= {f"{kind}_bytes": 1 for kind in ("parameters", "gradients", "optimizer", "activations", "other")}


def make(path: Path) -> RunFolder:
    return RunFolder.create(path, "[model]\nwidth = 64\n", JOB, ["meshwright", "train", "job.toml"])


def test_holds_where_the_run_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SLURM_JWT", "secret")
    monkeypatch.setenv("HOME_TOWN", "elsewhere")
    make(tmp_path / "runs" / "a")
    folder = RunFolder.open(tmp_path / "runs" / "a")
    assert folder.job() == JOB and folder.job_file() == "[model]\nwidth = 64\n"
    environment = folder.environment()
    assert environment["argv"] == ["meshwright", "train", "job.toml"]
    assert environment["torch"].startswith(torch.__version__.split("+")[0])
    assert environment["variables"]["NCCL_DEBUG"] == "INFO"
    assert not {"SLURM_JWT", "HOME_TOWN"} & set(environment["variables"])
    assert folder.code()["meshwright"]
    assert folder.metrics() == folder.events() == [] and folder.samples() == {}
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["a"]


def test_code_version_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    monkeypatch.chdir(repository)
    (repository / "train.py").write_text("a = 1\n")
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    make(tmp_path / "clean")
    clean = RunFolder.open(tmp_path / "clean").code()["working_directory"]
    assert len(clean["commit"]) == 40 and clean["dirty"] is False

    (repository / "train.py").write_text("a = 2\n")
    (repository / "new.py").write_text("")
    make(tmp_path / "dirty")
    dirty = RunFolder.open(tmp_path / "dirty").code()["working_directory"]
    assert dirty == {**clean, "dirty": True, "untracked": ["new.py"]}
    assert "+a = 2" in (tmp_path / "dirty" / "code.diff").read_text()


def test_without_git_the_code_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    make(tmp_path / "run")
    code = RunFolder.open(tmp_path / "run").code()
    assert code["package"] is None and code["working_directory"] is None
    assert not (tmp_path / "run" / "code.diff").exists()


def test_an_environment_inside_a_checkout_is_not_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text(".venv/\n")
    package = tmp_path / ".venv" / "meshwright"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr("meshwright.__file__", str(package / "__init__.py"))
    make(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").code()["package"] is None


def test_lines_come_back_with_what_json_cannot_say(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    row = {"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "mfu": None, "tokens": 4096}
    folder.metric(row)
    folder.metric({"step": numpy.int64(2), "loss": torch.tensor(2.5), "nested": [math.nan]})
    first, second = RunFolder.open(tmp_path / "run").metrics()
    assert math.isnan(first.pop("loss")) and first == {key: value for key, value in row.items() if key != "loss"}
    assert second == {"step": 2, "loss": 2.5, "nested": ["nan"]}
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_lines_are_out_before_anything_is_closed_and_a_torn_one_is_skipped(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    folder.metric({"step": 1, "loss": 2.0})
    path = tmp_path / "run" / "metrics.jsonl"
    assert path.read_text() == '{"step": 1, "loss": 2.0}\n'
    folder.close()
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    again = RunFolder.open(tmp_path / "run")
    assert [row["step"] for row in again.metrics()] == [1]
    again.metric({"step": 2, "loss": 1.5})
    assert [row["step"] for row in again.metrics()] == [1, 2]


def test_events_carry_time_and_decide_the_state(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    assert folder.state() == "running"
    for kind, fields, state in (
        ("start", {}, "running"),
        ("stop", {"reason": "interrupted"}, "stopped"),
        ("start", {}, "running"),
        ("stop", {"reason": "failed"}, "failed"),
        ("restart", {}, "running"),
        ("stop", {"reason": "finished"}, "done"),
        ("report", {}, "done"),
    ):
        folder.event(kind, **fields)
        assert folder.state() == state
    events = folder.events()
    elapsed = [event["elapsed_s"] for event in events]
    assert all(event["time"].endswith("+00:00") for event in events) and [0.0, *elapsed] == sorted([0.0, *elapsed])
    assert events[1]["reason"] == "interrupted"


def test_samples_by_step(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    folder.sample(100, "def f():\n")
    folder.sample(20, "wörd \udc80")
    assert (tmp_path / "run" / "samples" / "step-00000100.txt").read_text() == "def f():\n"
    assert folder.samples() == {20: "wörd ?", 100: "def f():\n"}


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty")
    with pytest.raises(UserError, match=r"run\.folder = \".*empty\" holds a run; .*choose another"):
        make(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.folder"):
        make(tmp_path / "file")
    with pytest.raises(UserError, match=r"run\.folder.*a file is in the way"):
        make(tmp_path / "file" / "below")
    with pytest.raises(UserError, match="is not a run folder"):
        RunFolder.open(tmp_path / "nowhere")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = Path.write_text

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        if self.name == "code.json":
            raise OSError(number, "disk says no")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"run\.folder = .*no space left.*; free some"):
        make(tmp_path / "deep" / "down" / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_rows_a_disk_does_not_take_are_kept_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder, told = make(tmp_path / "run"), list[str]()
    folder.tell = told.append
    folder.metric({"step": 1})
    real, calls = os.write, []

    def nearly_full(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 1:
            return real(descriptor, data[:5])
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", nearly_full)
        patched.setattr(Path, "write_bytes", lambda *_: nearly_full(0, b""))
        folder.metric({"step": 2})
        folder.event("bad_step", step=2)
        folder.memory(MEMORY_ROW)
        folder.sample(2, "a text")
        folder.metric({"step": 3})
        assert not folder.written() and folder.metrics() == [{"step": 1}]
        with pytest.raises(UserError, match=r"run\.folder = .*run\" cannot be written \(.*\); "):
            folder.require_written()
        assert len(told) == 1 and os.strerror(number) in told[0], "said once"
    folder.metric({"step": 4})
    assert folder.written() and folder.metrics() == [{"step": step} for step in (1, 2, 3, 4)]
    assert [event["kind"] for event in folder.events()] == ["bad_step", "caught_up"]
    assert folder.memory_curve() == [MEMORY_ROW] and folder.samples() == {2: "a text"}
    assert len(told) == 2 and "can be written again" in told[1]


def test_a_row_torn_by_a_full_disk_and_a_kill_is_left_out_by_the_next_attempt(tmp_path: Path) -> None:
    make(tmp_path / "run").metric({"step": 1, "long": "x" * 100_000})
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "long": "' + "y" * 100_000)
    again = RunFolder.open(tmp_path / "run")
    again.metric({"step": 2})
    assert [row["step"] for row in again.metrics()] == [1, 2]


@pytest.mark.parametrize("name", ["job.resolved.json", "environment.json", "code.json"])
def test_a_damaged_folder_is_named_in_one_sentence(cli, tmp_path: Path, name: str) -> None:
    RunFolder.create(tmp_path / "run", "", {"run": {"steps": 3}}, [])
    (tmp_path / "run" / name).write_text('{"torn":\n')
    told = cli("report", "run")
    assert told.code == 2 and f"run/{name} is damaged" in told.err and len(told.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_damaged_line_costs_that_line_and_is_told(cli, tmp_path: Path, name: str) -> None:
    folder = RunFolder.create(tmp_path / "run", "", {"run": {"steps": 3}}, [])
    folder.event("start", attempt=0)
    folder.metric({"step": 2, "loss": 2.0})
    (tmp_path / "run" / name).write_text('{"torn":\n' + (tmp_path / "run" / name).read_text())
    told = json.loads(cli("status", "run", "--json").out)
    assert told["step"] == 2 and f"one line of {name} cannot be read and is left out (line 1" in told["why"]
    (tmp_path / "run" / name).unlink()
    assert f"run/{name} is missing" in cli("status", "run").err


def test_a_run_that_a_second_signal_ended_was_stopped_and_did_not_fail(cli, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "", {"run": {"steps": 3}}, [])
    folder.event("start", attempt=0)
    record_failure(folder, KeyboardInterrupt(), "KeyboardInterrupt: ", print)
    told = json.loads(cli("status", "run", "--json").out)
    assert told["state"] == "stopped" and "a second signal stopped it at once, unsaved" in told["why"]
