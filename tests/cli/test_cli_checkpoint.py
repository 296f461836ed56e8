"""`meshwright checkpoint`: what a run has saved, as a table and as JSON with stable keys."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from meshwright.checkpoint.records import Manifest
from meshwright.checkpoint.shares import seal_of
from meshwright.checkpoint.tensorfile import hash_file


@pytest.fixture
def run(cli, tiny_job: Path) -> Path:
    words = ["checkpoint.every_steps=2", "checkpoint.keep_last=9", "run.steps=6", "evaluation.every_steps=0"]
    assert cli("train", "job.toml", *(word for each in words for word in ("--set", each))).code == 0
    return tiny_job.parent / "run"


def test_list_show_verify_diff_and_prune(cli, run: Path) -> None:
    listed = json.loads(cli("checkpoint", "list", "run", "--json").out)
    assert set(listed) == {"run", "checkpoints", "backup"}
    assert listed["backup"] == {"target": None, "error": None, "copies": []}
    assert [row["step"] for row in listed["checkpoints"]] == [6, 4, 2]
    assert set(listed["checkpoints"][0]) == {"step", "attempt", "ranks", "time", "bytes", "damage"}
    assert cli("checkpoint", "list", "run").out.count("complete") == 3

    shown = json.loads(cli("checkpoint", "show", "run", "--json").out)
    assert set(shown) == {"path", "attempt", "time", "ranks", "facts", "layout", "files", "tensors"}
    assert shown["facts"]["step"] == 6 and shown["facts"]["position"] == 24
    assert shown["tensors"]["optimizer/final_norm.weight/exp_avg"] == {"shape": [64], "dtype": "F32"}
    text = cli("checkpoint", "show", "run/checkpoints/step-00000004").out
    assert "position         16" in text and "optimizer" in text

    checked = json.loads(cli("checkpoint", "verify", "run", "--json").out)
    assert checked == {
        "run": "run", "ok": True, "checkpoints": [{"step": step, "damage": None} for step in (6, 4, 2)],
    }  # fmt: skip

    assert cli("checkpoint", "diff", "run", "run").out == "bitwise equal\n"
    compared = cli("checkpoint", "diff", "run/checkpoints/step-00000004", "run", "--json")
    told = json.loads(compared.out)
    assert compared.code == 1 and set(told) == {"equal", "compared", "facts", "tensors"}
    assert told["facts"]["step"] == [4, 6] and not told["equal"]
    assert {"model/final_norm.weight", "optimizer/final_norm.weight/step"} <= {row["name"] for row in told["tensors"]}
    assert "rng/00000/cpu" not in {row["name"] for row in told["tensors"]}, "nothing draws from it"

    (run / "checkpoints/step-00000004/manifest.json").unlink()
    planned = json.loads(cli("checkpoint", "prune", "run", "--keep-last", "1", "--dry-run", "--json").out)
    assert planned == {"run": "run", "dry_run": True, "removed": ["step-00000002"]}
    assert "DAMAGED: run/checkpoints/step-00000004 has no manifest.json" in cli("checkpoint", "verify", "run").out
    assert cli("checkpoint", "prune", "run", "--keep-last", "1", "--damaged").code == 0
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["step-00000006"]


def test_prune_keeps_what_the_job_keeps_for_good(cli, run: Path) -> None:
    job = json.loads((run / "job.resolved.json").read_text())
    job["checkpoint"]["keep_every"] = 4
    (run / "job.resolved.json").write_text(json.dumps(job))

    def removed(*options: str) -> list[str]:
        found = cli("checkpoint", "prune", "run", "--keep-last", "1", "--dry-run", "--json", *options)
        return json.loads(found.out)["removed"]

    assert removed() == ["step-00000002"]
    assert removed("--keep-every", "2") == []
    assert removed("--keep-every", "0") == ["step-00000004", "step-00000002"]
    job["checkpoint"]["keep_every"] = "4"
    (run / "job.resolved.json").write_text(json.dumps(job))
    refused = cli("checkpoint", "prune", "run", "--keep-last", "1")
    assert refused.code == 2 and "its checkpoint.keep_every is not a number" in refused.err
    assert len(list((run / "checkpoints").iterdir())) == 3


def test_what_is_no_run_is_refused(cli, tiny_job: Path) -> None:
    for command in (["list", "corpus"], ["show", "corpus"], ["verify", "nowhere"], ["diff", "corpus", "corpus"]):
        result = cli("checkpoint", *command)
        assert result.code == 2 and len(result.err.splitlines()) == 1 and "Traceback" not in result.err


def test_a_run_without_checkpoints_is_still_a_run(cli, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for command in (["show", "run"], ["diff", "run", "run"], ["export", "run", "out"]):
        assert "run holds no complete checkpoint under checkpoints/; wait until" in cli("checkpoint", *command).err


def test_a_path_with_brackets_and_a_loss_that_is_no_number_are_told_as_they_are(cli, run: Path) -> None:
    path = run / "checkpoints/step-00000006"
    index = json.loads((path / "index.json").read_text())
    index["facts"]["loss"] = float("nan")
    (path / "index.json").write_text(json.dumps(index))
    manifest = json.loads((path / "manifest.json").read_text())
    size, sha256 = (path / "index.json").stat().st_size, hash_file(path / "index.json")
    manifest["files"]["index.json"] = {"bytes": size, "sha256": sha256}
    manifest["seal"] = seal_of(Manifest.model_validate_json(json.dumps(manifest)))
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert cli("checkpoint", "diff", "run", "run").code == 0, "what is no number is equal to itself"

    def no_json(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    shown = json.loads(cli("checkpoint", "show", "run", "--json").out, parse_constant=no_json)
    assert shown["facts"]["loss"] == "nan"
    (path / "manifest.json").unlink()
    run.rename(run.with_name("[red]"))
    assert "[red]/checkpoints" in cli("checkpoint", "list", "[red]").out.replace("\n", "")


def test_what_may_not_be_removed_is_told_in_a_sentence(cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", forbidden)
    told = cli("checkpoint", "prune", "run")
    assert told.code == 2 and "step-00000002 cannot be removed (Permission denied); check that you have" in told.err
