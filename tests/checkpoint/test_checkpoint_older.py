"""What an older version wrote is read by this one: a run of version 0.1 goes on with the losses it had then."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.checkpoint import newest
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.runs import RunFolder

OLD = Path(__file__).parent / "version-0.1"


@pytest.mark.parametrize(
    ("kept", "changes"),
    [
        ("synthetic", []),
        # Saved by two ranks, from blended files whose documents are masked, with dropout: one process goes on with it.
        ("text", ["layout.dp_shard=1", "layout.zero=0"]),
    ],
)
def test_a_run_of_version_0_1_goes_on_as_it_did_then(
    kept: str, changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(OLD / kept, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    newest(Path("run")).verify()
    run_job(load_job("run", ["run.folder=run", *changes]), Console(quiet=True), resume=True)
    then = rows(OLD / kept / "run")
    now = rows(Path("run"))
    assert [now[step]["attempt"] for step in range(1, 9)] == [0] * 4 + [1] * 4
    for step in (5, 6, 7, 8):
        for name in {"loss", "grad_norm", "lr", "tokens", "val_loss"} & set(then[step]):
            # Other machines and torches round otherwise.
            assert now[step][name] == pytest.approx(then[step][name], rel=1e-5), (step, name)
    assert ("val_loss" in then[8]) == (kept == "text")
    assert newest(Path("run")).facts.step == 8
    if changes:  # which the job file then holds, next to how it was written
        assert load_job("run/job.toml").job.layout == load_job("run").job.layout
        assert Path("run/job.original.toml").read_text() == (OLD / kept / "run/job.toml").read_text()


def rows(run: Path) -> dict[int, dict[str, Any]]:
    """What a run recorded of each step."""
    found: dict[int, dict[str, Any]] = {}
    for row in RunFolder.open(run).metrics():
        found.setdefault(row["step"], {}).update(row)
    return found
