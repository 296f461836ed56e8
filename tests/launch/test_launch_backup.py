"""A run whose checkpoints are lost or damaged goes on from their copies, to the bit."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.checkpoint import StoredWeights, backups, checkpoint_path, newest
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.ranks import find_place
from meshwright.runs.folder import RunFolder
from meshwright.verify.ranks import run_ranks

QUIET = Console(quiet=True)
SETTINGS = [
    "data.cache=cache", "checkpoint.every_steps=2", "evaluation.every_steps=0", "batch.sequence_length=16",
    "model.layers=1", "model.width=32", "model.heads=2", "model.kv_heads=1", "model.ffn_width=32",
    "checkpoint.backup_to=store", "run.steps=6", "schedule.name=constant",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_job.parent)


def train(*overrides: str, resume: bool = False, folder: str = "run") -> None:
    run_job(load_job("job.toml", [*SETTINGS, f"run.folder={folder}", *overrides]), QUIET, resume=resume)


def rows(folder: str) -> dict[int, list[str]]:
    found = RunFolder.open(Path(folder)).metrics()
    return {row["step"]: [repr(row[name]) for name in ("loss", "grad_norm", "lr")] for row in found if "loss" in row}


def events(kind: str, folder: str = "run") -> list[dict[str, Any]]:
    return [event for event in RunFolder.open(Path(folder)).events() if event["kind"] == kind]


@pytest.mark.thorough
def test_lost_and_damaged_checkpoints_come_back_from_the_backup() -> None:
    train("checkpoint.backup_to=elsewhere", "run.steps=9", folder="alone")
    train()
    assert [one.step for one in backups(Path("run"), "store")] == [6, 4]
    shutil.rmtree("run/checkpoints")
    train("run.steps=7", resume=True)
    [event] = events("restored")
    assert event["step"] == 6 and event["backup"] == "store"
    for path in Path("run/checkpoints").glob("step-*"):
        (path / "manifest.json").unlink()
    train("run.steps=8", resume=True)
    assert [event["step"] for event in events("restored")] == [6, 7] and len(events("checkpoint_refused")) == 2

    shutil.rmtree("run")  # all of it
    train("run.steps=9", resume=True)
    assert [event["step"] for event in events("restored")] == [8] == [event["step"] for event in events("resume")]
    assert rows("run") == {9: rows("alone")[9]}
    assert newest(Path("run")).facts == newest(Path("alone")).facts


def test_a_sound_checkpoint_in_the_folder_is_preferred_and_needs_no_backup() -> None:
    train()
    shutil.rmtree("store")
    train("run.steps=7", resume=True)
    assert events("restored") == [] and [one.step for one in backups(Path("run"), "store")] == [7]


def test_a_finished_run_without_a_backup_says_so_and_a_resume_copies_it(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self, *_, **__):
        raise PermissionError(errno.EACCES, "no longer allowed", "store")

    store = f"memory://missing-{os.getpid()}"
    words = [word for each in (*SETTINGS, "run.steps=2", f"checkpoint.backup_to={store}") for word in ("--set", each)]
    with monkeypatch.context() as patched:
        patched.setattr("fsspec.implementations.memory.MemoryFileSystem.put_file", forbidden)
        told = cli("train", "job.toml", "--set", "run.folder=run", *words)
    assert told.code == 0 and "finished at step 2" in told.out
    assert f"backup   none: the last checkpoint, step-00000002, has no backup in {store}" in told.out
    [missing] = events("backup_missing")
    assert (missing["step"], missing["store"], missing["error"]) == (2, store, "no longer allowed: store")
    note = f'<p class="note alarm">The last checkpoint, of step 2, has no backup in {store} (no longer allowed'
    assert note in Path("run/report.html").read_text()
    told = cli("train", "run", "--resume")
    assert [one.step for one in backups(Path("run"), store)] == [2] and "has no backup" not in told.out
    assert note not in Path("run/report.html").read_text()


def test_a_new_run_does_not_mix_with_the_copies_of_another() -> None:
    train("run.steps=2")
    shutil.rmtree("run")
    with pytest.raises(UserError, match=r"checkpoint\.backup_to = store holds checkpoints of another run named run"):
        train()
    assert not Path("run").exists()


def test_a_backup_without_a_sound_copy_is_told_and_the_run_begins_anew() -> None:
    train("run.steps=2")
    shutil.rmtree("run/checkpoints")
    Path("store/run/step-00000002/model.safetensors").write_bytes(b"torn")
    train("run.steps=2", resume=True)
    [refused] = events("checkpoint_refused")
    assert refused["error"].startswith("the backup ")
    assert "store/run/step-00000002/model.safetensors has 4 bytes" in refused["error"]
    assert [event["step"] for event in events("resume")] == [0]


def _rank(*overrides: str) -> None:
    place = find_place(os.environ)
    assert place is not None
    words = [*SETTINGS, "run.folder=run", "batch.micro_batch=1", "layout.dp_shard=2", *overrides]
    run_job(load_job("job.toml", words), QUIET, place, resume=True)


@pytest.mark.thorough
def test_ranks_share_what_rank_zero_brought_back() -> None:
    train("run.steps=4")
    shutil.rmtree("run")
    run_ranks(_rank, 2, "run.steps=6")
    assert [event["step"] for event in events("restored")] == [4] and newest(Path("run")).facts.step == 6


def test_list_and_restore(cli) -> None:
    train()
    listed = json.loads(cli("checkpoint", "list", "run", "--json").out)["backup"]
    assert listed["target"] == "store" and listed["error"] is None
    assert [(row["step"], row["complete"]) for row in listed["copies"]] == [(6, True), (4, True)]
    shutil.rmtree("run/checkpoints")
    with pytest.raises(
        UserError, match=r"holds no complete checkpoint .*; meshwright checkpoint restore run restores one"
    ):
        StoredWeights(Path("run"))
    assert "backup: step 6 at " in cli("checkpoint", "list", "run").out
    done = json.loads(cli("checkpoint", "restore", "run", "--json").out)
    assert done["step"] == 6 and Path(done["path"]) == checkpoint_path(Path("run"), 6) and done["refused"] == []
    assert StoredWeights(Path("run")).step == 6
    shutil.rmtree("store")
    assert "has no intact copy of run; start the run from scratch" in cli("checkpoint", "restore", "run").err
    Path("store").write_text("in the way")
    listed = cli("checkpoint", "list", "run")
    assert listed.code == 0 and "complete" in listed.out
    assert "backup: checkpoint.backup_to = store cannot be read" in listed.out
    plain = [word for word in SETTINGS if "backup_to" not in word]
    run_job(load_job("job.toml", [*plain, "run.folder=plain", "run.steps=1"]), QUIET)
    refused = cli("checkpoint", "restore", "plain")
    assert refused.code == 2 and "sets no checkpoint.backup_to" in refused.err
