"""What an older version wrote is read by this one: a run of version 0.1 goes on with the losses it had then."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.checkpoint import newest
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.runs import RunFolder

OLD = Path(__file__).parent / "version-0.1/run"


def test_a_run_of_version_0_1_goes_on_as_it_did_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    newest(Path("run")).verify()
    run_job(load_job("run", ["run.folder=run"]), Console(quiet=True), resume=True)
    then = {row["step"]: row for row in RunFolder.open(OLD).metrics()}
    now = {row["step"]: row for row in RunFolder.open(Path("run")).metrics()}
    assert [now[step]["attempt"] for step in sorted(now)] == [0] * 4 + [1] * 4
    for step in (5, 6, 7, 8):
        for name in ("loss", "grad_norm", "lr", "tokens"):  # other machines and torches round otherwise
            assert now[step][name] == pytest.approx(then[step][name], rel=1e-5), (step, name)
    assert newest(Path("run")).facts.step == 8
