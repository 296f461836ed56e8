"""Training from Python: the run that the command makes, callbacks on the way, and a stop that they ask for."""

from pathlib import Path
from typing import Any

import pytest
from api_fixtures import registered  # noqa: F401

import meshwright
from meshwright.errors import UserError


class Notes(meshwright.Callback):
    """Writes down what it is called with."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.evaluations: list[dict[str, Any]] = []
        self.saved: list[int] = []
        self.ended: meshwright.Run | None = None
        self._stop_at = stop_at

    def on_step(self, row: dict[str, Any]) -> bool:
        self.steps.append(row["step"])
        self.losses.append(row["loss"])
        return row["step"] == self._stop_at

    def on_evaluation(self, row: dict[str, Any]) -> None:
        self.evaluations.append(row)

    def on_checkpoint(self, event: dict[str, Any]) -> None:
        self.saved.append(event["step"])

    def on_end(self, run: Any) -> None:
        self.ended = run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_callbacks_hear_of_everything(here: None, tiny_job: Path) -> None:
    notes, rows = Notes(), list[dict[str, Any]]()
    run = meshwright.train(
        meshwright.load_job(tiny_job, set={"checkpoint.every_steps": 4}), callbacks=[notes, rows.append]
    )
    assert notes.steps == list(range(1, 11)) == [row["step"] for row in rows]
    assert [row["step"] for row in notes.evaluations] == [0, 5, 10] and notes.evaluations[0]["val_loss"] > 0
    assert notes.saved == [4, 8, 10] and notes.ended is run
    assert run.state == "done" and run.losses == notes.losses and (run.path / "report.html").is_file()
    assert run.losses[-1] < run.losses[0]


@pytest.mark.thorough
def test_a_callback_may_ask_to_stop_and_the_run_be_resumed(here: None, tiny_job: Path) -> None:
    whole = meshwright.train(meshwright.load_job(tiny_job, set={"run.folder": "whole"}))
    notes = Notes(stop_at=3)
    run = meshwright.train(tiny_job, callbacks=notes)
    assert notes.steps == [1, 2, 3, 4] and run.state == "stopped"
    assert run.events("stop")[-1]["signal"] == "callback" and run.checkpoint.step == 4
    with pytest.raises(UserError, match="holds a run; add --resume to continue it"):
        meshwright.train(tiny_job)
    assert meshwright.train(tiny_job, resume=True).losses == whole.losses


@pytest.mark.thorough
def test_what_a_callback_raises_ends_the_run_and_reaches_the_caller(here: None, tiny_job: Path) -> None:
    def fail(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            raise ZeroDivisionError("the callback's own")

    for nproc in (1, 2):
        job = meshwright.load_job(tiny_job, set={"run.folder": f"run-{nproc}", "layout.dp_shard": nproc})
        with pytest.raises(ZeroDivisionError, match="the callback's own"):
            meshwright.train(job, callbacks=[fail], nproc=nproc)
        assert meshwright.open_run(f"run-{nproc}").state in ("failed", "stopped", "done")


@pytest.mark.thorough
def test_ranks_of_its_own_report_to_callbacks_here(here: None, own: None, tiny_job: Path) -> None:
    """Without threads to compute with, this process can be forked, and its forks know what is registered in it."""
    notes = Notes()
    names = {"optimizer.name": "nesterov", "schedule.name": "inverse-root", "log.sinks": ["lines"]}
    job = meshwright.load_job(tiny_job, set={**names, "layout.dp_shard": 2, "checkpoint.every_steps": 5})
    run = meshwright.train(job, callbacks=[notes], nproc=2)
    assert notes.steps == list(range(1, 11)) and notes.losses == run.losses and notes.saved == [5, 10]
    assert [row["step"] for row in notes.evaluations] == [0, 5, 10] and notes.ended is run
    assert run.checkpoint.job()["layout"]["dp_shard"] == 2
    lines = (run.path / "lines.txt").read_text().splitlines()
    assert lines[-1] == "closed True" and sum('"loss"' in line for line in lines) == 10
    alone = meshwright.train(meshwright.load_job(job, set={"layout.dp_shard": 1, "run.folder": "alone"}))
    assert run.losses == pytest.approx(alone.losses, rel=1e-4)


@pytest.mark.thorough
def test_ranks_stop_when_a_callback_asks(here: None, tiny_job: Path) -> None:
    job = meshwright.load_job(tiny_job, set={"layout.dp_shard": 2, "run.steps": 100000})
    run = meshwright.train(job, callbacks=[Notes(stop_at=2)], nproc=2)
    assert run.state == "stopped" and run.events("stop")[-1]["signal"] == "callback" and run.rows[-1]["step"] > 2


def test_mistakes_are_named(here: None, tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="callbacks has a int"):
        meshwright.train(tiny_job, callbacks=[3])  # type: ignore[list-item]
    with pytest.raises(UserError, match="callbacks has a int"):
        meshwright.train(tiny_job, callbacks=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="layout needs 2 ranks"):
        meshwright.train(meshwright.load_job(tiny_job, set={"layout.dp_shard": 2}))
    assert not Path("run").exists()


def test_new_processes_must_be_able_to_find_it(own: None, tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.api.launching import require_installed

    require_installed(meshwright.load_job(tiny_job))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # this process may have computed with threads that a fork lacks
    with pytest.raises(UserError, match="is registered in this process alone, and ranks are new ones"):
        job = meshwright.load_job(tiny_job, set={"optimizer.name": "nesterov", "layout.dp_shard": 2})
        meshwright.train(job, nproc=2)
    for field, value in (("optimizer.name", "nesterov"), ("data.sources", ["counted:3"]), ("log.sinks", ["lines"])):
        with pytest.raises(UserError, match="is registered in this process alone"):
            require_installed(meshwright.load_job(tiny_job, set={field: value}))
