"""The rehearsal that a ladder begins with: its script, what it decides, and what status says of it."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from rehearsals import SHORT, WHOLE, saved

from meshwright.errors import UserError
from meshwright.hardware import Site
from meshwright.job import load_job
from meshwright.launch.slurm import Request, Shape, Submission, status_of
from meshwright.launch.slurm import status as status_module
from meshwright.launch.slurm.commands import SlurmJob
from meshwright.launch.slurm.ladder import Rehearsing, make_rungs
from meshwright.rehearse import Rehearsal
from meshwright.runs import RunFolder

SITE = Site(name="here", title="here", gpus_per_node=2, partition="p")
ASKED = Request("1:00:00", None, "p", None, 300, False, None)


def first_rung(run: Path) -> Rehearsing:
    loaded = load_job("demo", ["layout.dp_replicate=2", "batch.global_batch=16"])
    rung, *trials = make_rungs(loaded, run, SITE, Shape(1, 2), None, print)
    assert isinstance(rung, Rehearsing) and len(trials) == 1
    return rung


def test_the_ladder_begins_with_the_whole_job_on_one_gpu(cli, tmp_path: Path) -> None:
    words = ["--site", "vega", "--time", "12:00:00", "--dry-run", "--ladder", "--json"]
    changes = ["--set", "layout.dp_shard=16", "--set", "batch.global_batch=128", "--set", "run.folder=new"]
    scripts = json.loads(cli("submit", "demo", *words, *changes).out)["scripts"]
    assert list(scripts) == [f"slurm/{name}.sh" for name in ("rehearse", "trial-1", "trial-4", "trial-8", "run")]
    script = scripts["slurm/rehearse.sh"]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    for directive in ("--job-name=new-rehearse", "--nodes=1", "--gpus-per-node=1", "--time=00:30:00", "--no-requeue"):
        assert f"#SBATCH {directive}" in script
    [line] = [line for line in script.splitlines() if " rehearse " in line]
    given = shlex.split(line)
    assert given[given.index("rehearse") :] == [
        *("rehearse", "$run/job.toml", "--each-stage", "--out", "$run/rehearsal", "--cluster", "4xvega")
    ]
    assert "meshwright rehearse" not in scripts["slurm/trial-1.sh"]


def test_a_part_of_a_node_and_an_unknown_gpu(tmp_path: Path) -> None:
    loaded = load_job("demo", ["layout.dp_replicate=2", "batch.global_batch=16"])
    four = Site(name="four", title="four", gpus_per_node=4, gpu="h100")
    assert make_rungs(loaded, tmp_path, four, Shape(1, 2), None, print)[0].cluster == "1x2xh100"
    assert first_rung(tmp_path).cluster is None, "the planner does not know what is there"
    alone = load_job("demo")
    assert make_rungs(alone, tmp_path, four, Shape(1, 1), None, print) == ()
    with pytest.raises(UserError, match=r"rehearsal and trials alone may take 0\.75"):
        make_rungs(loaded, tmp_path, four, Shape(1, 2), 0.7, print)


def ends(run: Path, monkeypatch: pytest.MonkeyPatch, code: int, found: Rehearsal | None) -> tuple[int, str, str]:
    """Run the rehearsal's script, whose step leaves this and ends so: exit code, why no job follows, and the status."""
    RunFolder.create(run, "", load_job("demo").job.model_dump(mode="json"), ["meshwright"])
    rung = first_rung(run)
    rung.make()
    assert load_job(str(rung.run / "job.toml")).job.layout.dp_replicate == 2
    (run / "slurm").mkdir()
    prepared = run.parent / f"{run.name}-prepared"
    copy = "" if found is None else f'cp -r "{saved(prepared, found)}" "$run/rehearsal"'
    (run / "bin").mkdir()
    (run / "bin/srun").write_text(f"#!/bin/sh\n{copy}\nexit {code}\n")
    (run / "bin/srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{run}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    ended = subprocess.run(["bash", "-c", rung.script(SITE, ASKED)], env=environment, capture_output=True, text=True)
    known = {"7": SlurmJob("7", "FAILED" if ended.returncode else "COMPLETED"), "8": SlurmJob("8", "CANCELLED")}
    monkeypatch.setattr(status_module, "job_state", known.get)
    Submission("here", ("8",), 1, 2, 1, "10", ladder=("7",)).write(run)
    return ended.returncode, (rung.run / "slurm/over").read_text().strip(), status_of(run).why


@pytest.mark.thorough
def test_a_rank_that_does_not_fit_ends_the_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, over, why = ends(tmp_path / "run", monkeypatch, 1, SHORT)
    assert code == 1 and over == "failed: the trial says no"
    assert why.startswith("no-go from the rehearsal: rank 48 of 64 (last stage) needs 84.1 GiB")


@pytest.mark.thorough
def test_ranks_that_fit_let_the_trials_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, over, _ = ends(tmp_path / "run", monkeypatch, 0, WHOLE)
    assert (code, over) == (0, "done")
    told = json.loads((tmp_path / "run/ladder/rehearse/slurm/verdict.json").read_text())
    assert told["go"] and told["step_s"] == 3.75 and "3.75 s per step" in told["why"]


@pytest.mark.thorough
@pytest.mark.parametrize(("code", "why"), [(1, "holds no rehearsal"), (2, "the rehearsal failed, see")])
def test_a_rehearsal_that_failed_lets_nothing_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, why: str
) -> None:
    ended, over, told = ends(tmp_path / "run", monkeypatch, code, None)
    assert ended == code and over.startswith("failed") and why in told


def test_status_names_the_job_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, "", load_job("demo").job.model_dump(mode="json"), ["meshwright"])
    first_rung(run).make()
    (run / "slurm").mkdir()
    Submission("here", ("9",), 1, 2, 1, "10", ladder=("7", "8")).write(run)
    for job, name in (("7", "rehearsal, "), ("8", "trial 1, "), ("9", "before step 1")):
        monkeypatch.setattr(status_module, "job_state", {job: SlurmJob(job, "RUNNING")}.get)
        assert status_of(run).why.startswith(name)
