"""A file that is there is overwritten only if somebody says so."""

import json
from pathlib import Path

import pytest

PLAN = ["plan", "--model", "llama-3.2-1b", "--cluster", "8xh100", "--seq", "2048", "--top", "1", "--write"]
WRITERS = {
    "plan": PLAN,
    "report of a plan": ["report", "pretrain-1b", "--cluster", "1xh200", "--out"],
    "picture of a plan": ["plan", "--check", "pretrain-1b", "--cluster", "1xh200", "--svg"],
    "picture of a schedule": ["schedule", "show", "--svg"],
    "from-deepspeed": ["job", "from-deepspeed", "ds.json", "--out"],
}


@pytest.mark.parametrize("name", WRITERS)
def test_only_with_force(cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}))
    (tmp_path / "mine").write_text("my own work")
    *_, option = words = WRITERS[name]
    refused = cli(*words, "mine")
    assert refused.code == 2 and refused.out == ""
    assert refused.err == f"meshwright: {option} = mine exists; add --force to overwrite it, or name another file\n"
    assert (tmp_path / "mine").read_text() == "my own work"
    done = cli(*words, "mine", "--force")
    assert done.code == 0 and (tmp_path / "mine").read_text() != "my own work", done
    assert cli(*words, "new").code == 0


def test_a_plan_s_page_by_its_default_name(cli, tmp_path: Path) -> None:
    words = ["report", "pretrain-1b", "--cluster", "1xh200"]
    (tmp_path / "pretrain-1b.html").write_text("my own work")
    refused = cli(*words)
    assert refused.code == 2 and "--out = pretrain-1b.html exists; add --force" in refused.err, refused
    assert (tmp_path / "pretrain-1b.html").read_text() == "my own work"
    assert cli(*words, "--force").code == 0 and "<html" in (tmp_path / "pretrain-1b.html").read_text()


EARLY = [["calibrate", "--out"], ["tune", "demo", "--write"], ["report", "run", "--out"]]
EARLY += [["plan", "--validate", "rows.csv", "--markdown"]]


@pytest.mark.parametrize("words", EARLY)
def test_it_is_refused_before_anything_is_measured_or_read(cli, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "mine").write_text("my own work")
    refused = cli(*words, "mine")
    assert refused.code == 2 and "= mine exists; add --force" in refused.err, refused
