"""A rehearsal on disk: complete or not there, read back as it was, and refused in one sentence when it is not one."""

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rehearsals import ALONE, SHORT, WHOLE, saved

from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.rehearse import Rehearsal
from meshwright.rehearse.folder import read_rehearsal, save_rehearsal
from meshwright.runs import RunFolder


@pytest.mark.parametrize("rehearsal", [WHOLE, ALONE, SHORT], ids=["whole", "alone", "short"])
def test_it_comes_back_as_it_was_beside_job_and_provenance(rehearsal: Rehearsal, tmp_path: Path) -> None:
    run = saved(tmp_path / "deep" / "rehearsed", rehearsal)
    assert read_rehearsal(run) == rehearsal
    folder = RunFolder.open(run)
    assert folder.resolved_job() == load_job("demo", ["layout.pp=4"]).job == load_job(str(run / "job.toml")).job
    assert folder.environment()["argv"] == ["meshwright", "rehearse", "demo"] and "meshwright" in folder.code()
    assert [entry.name for entry in run.parent.iterdir()] == ["rehearsed"]


def test_a_folder_that_is_taken_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"--out = .*mine exists and is not an empty folder; choose another"):
        saved(tmp_path / "mine")
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    assert read_rehearsal(saved(tmp_path / "empty")) == WHOLE


def test_nothing_is_left_of_one_that_cannot_be_written(tmp_path: Path) -> None:
    wrong = replace(WHOLE, warnings=(float("nan"),))
    with pytest.raises(ValueError):
        save_rehearsal(tmp_path / "rehearsed", load_job("demo"), wrong, [])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"--out = .*file/rehearsed cannot be written .*; choose another folder"):
        saved(tmp_path / "file" / "rehearsed")


def test_a_disk_that_is_full_at_the_last_file_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("meshwright.rehearse.folder.write_atomic", full)
    with pytest.raises(UserError, match=r"--out = .*rehearsed cannot be written \(no space left\); free some"):
        saved(tmp_path / "rehearsed")
    assert list(tmp_path.iterdir()) == []


def without(*path: str | int) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        for key in path[:-1]:
            table = table[key]
        del table[path[-1]]

    return change


def with_(value: Any, *path: str | int) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("world"), "does not have the fields of a rehearsal of this version"),
        (without("ranks", 0, "memory", "by_kind"), "does not have the fields"),
        (with_(1, "other"), "does not have the fields"),
        (with_("many", "ranks"), "does not have the fields"),
        (with_([3], "ranks"), "does not have the fields"),
        (with_("64", "world"), "its world has"),
        (with_(True, "world"), "its world has"),
        (with_(1.5, "ranks", 1, "messages", 0, "count"), "its ranks.1.messages.0.count has"),
        (with_(["x"], "ranks", 0, "messages", 1, "ranks"), "its ranks.0.messages.1.ranks.0 has"),
        (with_(-1, "ranks", 0, "pipeline_rank"), "its ranks.0.pipeline_rank has"),
        (with_("lost", "ranks", 2, "state"), "its ranks.2.state has"),
        (with_("much", "ranks", 0, "memory", "planned_terms", "weights"), "its ranks.0.memory.planned_terms.weights"),
        (with_([1], "ranks", 0, "phases_s"), "its ranks.0.phases_s has"),
        (with_({str(n): 1.0 for n in range(1000)}, "ranks", 0, "phases_s"), "its ranks.0.phases_s has"),
        (with_(10**40, "ranks", 0, "needed_bytes"), "does not fit 64 bits"),
        (with_("x" * 10_000, "warnings", 0), "its warnings.0 has"),
        (with_(None, "step", "step_s"), "its step.step_s has"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_content_is_refused_by_its_place(change: Callable[[Any], None], why: str, tmp_path: Path) -> None:
    table = json.loads(json.dumps(WHOLE.to_json()))
    change(table)
    (tmp_path / "rehearsal.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match=rf"rehearsal.json is damaged \(.*{why}.*\); rehearse the job again$"):
        read_rehearsal(tmp_path)


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "not JSON"), (b'{"world": 6', "not JSON"), (b"[1]", "not a table"), (b"\xff", "not UTF-8")],
    ids=["empty", "torn", "list", "bytes"],
)
def test_what_is_no_json_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "rehearsal.json").write_bytes(data)
    with pytest.raises(UserError, match=f"rehearsal.json is damaged .*{why}"):
        read_rehearsal(tmp_path)


def test_links_infinite_numbers_and_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no rehearsal; give a folder that `meshwright rehearse --out` wrote"):
        read_rehearsal(tmp_path)
    text = json.dumps(WHOLE.to_json()).replace("279620.0", "1e999")
    (tmp_path / "other.json").write_text(text)
    (tmp_path / "rehearsal.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(UserError, match="it is a link"):
        read_rehearsal(tmp_path)
    (tmp_path / "rehearsal.json").unlink()
    (tmp_path / "other.json").rename(tmp_path / "rehearsal.json")
    with pytest.raises(UserError, match=r"its step.tokens_per_s has the wrong type, is negative or too large"):
        read_rehearsal(tmp_path)
