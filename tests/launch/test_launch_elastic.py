"""`meshwright train --nproc`: real ranks under torch's agent, and the ways they end.

Launchers are forks of this process, which signals reach as they reach a new program; one is a new program.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_command import ForkedCommand, processes_of
from launch_processes import left_over
from waiting import LIMIT_S, wait_until

from meshwright.checkpoint import newest
from meshwright.parallel.engine import OneStage

TWO_RANKS = ["layout.dp_replicate=2", 'data.sources=["builtin:synthetic"]', "evaluation.every_steps=0"]
ENDLESS = [*TWO_RANKS, "run.steps=100000"]


def words(*overrides: str) -> list[str]:
    return ["train", "job.toml", *(word for override in overrides for word in ("--set", override))]


def ranks(launcher: int) -> list[int]:
    """The processes a launcher started and that still run."""
    listed = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True).stdout
    return [int(line) for line in listed.split()]


def wait_for_steps(process: ForkedCommand, run: Path) -> None:
    metrics = run / "metrics.jsonl"

    def has_trained() -> bool:
        assert process.poll() is None, process.finish()
        return metrics.is_file() and metrics.read_text().count('"loss"') > 3

    wait_until(has_trained, "four steps")


def stop_event(run: Path) -> dict:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events].count("stop") == 1
    return events[-1]


REFUSED = {
    "degrees and ranks differ": (3, ["layout.dp_replicate=2"], "--nproc 2"),
    "heads do not divide": (3, ["layout.tp=3"], "model.heads = 4; set layout.tp to one of 1, 2, 4"),
    "no ranks for a layout": (None, ["layout.tp=2"], "layout needs 2 ranks; add --nproc 2"),
    "one GPU for all": (2, ["layout.dp_replicate=2", "run.device=cuda:0"], 'set run.device = "cuda"'),
    "run folder taken": (2, ["layout.dp_replicate=2", "run.folder=corpus"], "run.folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_process_starts(cli, tiny_job: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    from meshwright.launch import elastic

    monkeypatch.setattr(elastic, "elastic_launch", lambda *_: pytest.fail("the agent was started"))
    nproc, overrides, sentence = REFUSED[case]
    before = set(tiny_job.parent.iterdir())
    result = cli(*words(*overrides), *([] if nproc is None else ["--nproc", str(nproc)]))
    assert result.code == 2 and sentence in result.err, result
    assert len(result.err.splitlines()) == 1 and "Traceback" not in result.err
    assert {path for path in tiny_job.parent.iterdir() if path.name != "cache"} == before


def test_ranks_are_not_started_inside_ranks(cli, tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    result = cli(*words(), "--nproc", "2")
    assert result.code == 2 and "--nproc 2 would start ranks inside rank 1 of 2" in result.err


@pytest.mark.thorough
def test_a_run_of_two_ranks(tiny_job: Path, tmp_path: Path) -> None:
    overrides = [
        "layout.dp_replicate=2",
        "data.cache=cache",
        f"run.folder={tmp_path}/run",
        "evaluation.sample_prompt=$$x",
        "evaluation.every_steps=2",
        "run.steps=4",
    ]
    program = [sys.executable, "-m", "meshwright", *words(*overrides), "--nproc", "2", "--json"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["reason"] == "finished" and told["step"] == 4 and told["folder"] == f"{tmp_path}/run"
    assert "Traceback" not in done.stderr and done.stderr.count("validation loss") == 3, "one rank speaks"
    run = tmp_path / "run"
    job = json.loads((run / "job.resolved.json").read_text())
    assert job["evaluation"]["sample_prompt"] == "$$x"
    assert stop_event(run)["reason"] == "finished"
    assert newest(run).facts.step == 4 and (run / "report.html").is_file()
    assert left_over(f"run.folder={run}") == []


@pytest.mark.thorough
def test_ranks_that_are_new_programs_as_on_gpus(cli, tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.launch import elastic

    monkeypatch.setattr(elastic, "can_fork", lambda job: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = cli(*words(*TWO_RANKS, "run.steps=1", "run.folder=run"), "--nproc", "2")
    assert result.code == 0, result
    assert newest(Path("run")).facts.step == 1
    assert stop_event(Path("run"))["reason"] == "finished"


def test_a_job_on_gpus_is_never_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.job import load_job
    from meshwright.launch.forked import can_fork

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    devices = ("auto", "cuda", "cpu")
    assert [can_fork(load_job("demo", [f"run.device={name}"]).job) for name in devices] == [False, False, True]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert can_fork(load_job("demo").job)


@pytest.mark.thorough
def test_ranks_whose_launcher_was_killed_save_and_stop(tiny_job: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = ForkedCommand(tmp_path, *words(*ENDLESS, f"run.folder={run}"), "--nproc", "2")
    wait_for_steps(process, run)
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT_S)
    wait_until(lambda: not processes_of(tmp_path), "processes of the run are left")
    event = stop_event(run)
    assert event["signal"] == "launcher died" and newest(run).facts.step == event["step"]


@pytest.mark.thorough
def test_a_crashed_rank_is_named_leaves_its_stack_and_takes_the_run_with_it(tiny_job: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = ForkedCommand(tmp_path, *words(*ENDLESS, f"run.folder={run}", "data.workers=1"), "--nproc", "2")
    wait_for_steps(process, run)
    os.kill(ranks(process.pid)[1], signal.SIGSEGV)
    code, _, err = process.finish()
    assert code == 1
    assert len(err.splitlines()) == 1 and (
        found := re.search(r"rank 1 was killed by SIGSEGV; its log is (\S+)", err)
    ), err
    assert "in run_job" in Path(found[1]).read_text()
    assert stop_event(run)["reason"] == "failed" and "rank 1" in stop_event(run)["error"]
    assert (run / "report.html").is_file()


def test_a_crashing_rank_is_the_only_one_heard(tiny_job: Path, tmp_path: Path) -> None:
    accumulate = OneStage.accumulate

    def fail_in_step_3(engine: OneStage, data: Any, step: int) -> Any:
        if step == 3 and os.environ["RANK"] == "1":
            raise ValueError("the third step")
        return accumulate(engine, data, step)

    def break_ranks() -> None:
        setattr(OneStage, "accumulate", fail_in_step_3)  # noqa: B010

    run = tmp_path / "run"
    arguments = [*words(*ENDLESS, f"run.folder={run}"), "--nproc", "2", "--debug"]
    code, _, err = ForkedCommand(tmp_path, *arguments, prepare=break_ranks).finish()
    assert code == 1, err
    assert err.count("Traceback") == 1 and err.count("ValueError: the third step") == 2
    assert (
        err.splitlines()[-1].startswith("meshwright: rank 1 failed at ") and "logs/rank-1.err" in err.splitlines()[-1]
    )
    assert "ValueError: the third step" in (run / "logs/rank-1.err").read_text()


@pytest.mark.thorough
def test_ctrl_c_ends_all_ranks_at_one_step_from_which_they_resume(tiny_job: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = ForkedCommand(tmp_path, *words(*ENDLESS, f"run.folder={run}"), "--nproc", "2")
    wait_for_steps(process, run)
    process.send_signal(signal.SIGINT)
    code, _, err = process.finish()
    assert code == 130 and "Traceback" not in err, err
    event = stop_event(run)
    assert event["reason"] == "interrupted" and event["signal"] == "SIGINT"
    assert newest(run).facts.step == event["step"]

    (run / "logs").mkdir()
    (run / "logs/stop").write_text("SIGINT")  # as a launcher that was killed leaves it
    last = event["step"] + 2
    resume = ["train", "run", "--resume", "--set", f"run.steps={last}", "--nproc", "2", "--json"]
    code, out, err = ForkedCommand(tmp_path, *resume).finish()
    assert code == 0, err
    assert json.loads(out)["step"] == newest(run).facts.step == last
    assert f"resuming from step {event['step']} (attempt 1)" in err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["attempt"]) for row in rows][-3:] == [(last - 2, 0), (last - 1, 1), (last, 1)]
