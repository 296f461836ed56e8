"""`meshwright rehearse` from the command line: it saves what it prints, and a folder that is taken costs no run."""

import json
from pathlib import Path

from command import Cli

from meshwright.cli.rehearse_text import rehearsal_text
from meshwright.rehearse import Rehearsal
from meshwright.rehearse.folder import read_rehearsal

JOB = str(Path(__file__).parents[1] / "small.toml")
PIPELINE = ("--set", "model.layers=2", "--set", "layout.pp=2", "--set", "batch.global_batch=4")


def test_every_kind_of_rank_is_run_saved_and_printed(cli: Cli) -> None:
    done = cli("rehearse", JOB, *PIPELINE, "--each-stage", "--steps", "1", "--json", "--out", "rehearsed")
    assert done.code == 0, done.err
    printed, saved = Rehearsal.from_json(json.loads(done.out)), read_rehearsal(Path("rehearsed"))
    assert printed == saved
    assert [(rank.rank, rank.place, rank.alike, rank.state) for rank in saved.ranks] == [
        (0, "first stage", 1, "measured"),
        (1, "last stage", 1, "measured"),
    ]
    for rank in saved.ranks:
        assert rank.memory is not None and rank.memory.allocated_bytes > 0 and rank.step_s > 0
        assert {"send", "recv"} <= {one.kind for one in rank.messages}
    text = rehearsal_text(saved)
    assert "rank 1 of 2 (last stage)" in text and max(map(len, text.splitlines())) <= 80
    assert "no numerics" in text and "no NCCL" in text and "no stragglers" in text
    recorded = json.loads(Path("rehearsed/environment.json").read_text())["argv"]
    assert recorded[:2] == ["meshwright", "rehearse"] and "--each-stage" in recorded
    assert cli("report", "rehearsed").code == 0
    assert not Path("run").exists()  # the training's folder stays free


def test_a_taken_folder_is_refused_before_anything_runs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    refused = cli("rehearse", JOB, *PIPELINE, "--out", "mine")
    assert refused.code == 2
    assert refused.err == "meshwright: --out = mine exists and is not an empty folder; choose another\n"
