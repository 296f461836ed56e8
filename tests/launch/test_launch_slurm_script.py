"""Batch scripts, states in a word, trials and logs, without a Slurm."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.hardware import Site, find_site
from meshwright.job import LoadedJob, load_job
from meshwright.launch.slurm import Shape, Submission, batch_script, log_files, request_of, status_of, statuses
from meshwright.launch.slurm import status as status_module
from meshwright.launch.slurm.commands import SlurmJob
from meshwright.launch.slurm.ladder import make_rungs, shrunk, verdict
from meshwright.launch.slurm.script import seconds_of
from meshwright.launch.slurm.submit import shape_of
from meshwright.runs import RunFolder, lifecycle

SITE = Site(name="here", title="here", gpus_per_node=2, partition="p", container_command="apptainer exec --nv")


def request(site: Site = SITE, **given):
    fields = {"time": "1:00:00", "account": None, "partition": None, "qos": None, "signal_s": 60, "per_rank": False}
    return request_of(site, **{**fields, "container": None, **given})


def run_folder(path: Path, *events: tuple, rows: int = 0, step_s: float = 1.0) -> RunFolder:
    folder = RunFolder.create(path, "", load_job("demo").job.model_dump(mode="json"), ["meshwright"])
    for kind, fields in events:
        folder.event(kind, **fields)
    for step in range(1, rows + 1):
        folder.metric({"step": step, "loss": 2.0, "tokens": 100 * step, "step_s": step_s, "attempt": 0})
    return folder


def test_what_no_profile_can_know_is_asked_for() -> None:
    lumi = find_site("lumi")
    with pytest.raises(UserError, match="lumi needs --account"):
        request(lumi)
    with pytest.raises(UserError, match="lumi needs --time"):
        request(lumi, time=None, account="x")
    with pytest.raises(UserError, match="longer than lumi allows; give at most 2-00:00:00"):
        request(lumi, account="x", time="2-00:00:01")
    with pytest.raises(UserError, match="is not less than --time"):
        request(time="1", signal_s=60)
    with pytest.raises(UserError, match="set container_command in a profile"):
        request(lumi, account="x", container="image.sif")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("10:30", 630), ("2:00:00", 7200), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_slurms_durations(time: str, seconds: int) -> None:
    assert seconds_of(time, "--time") == seconds


def test_the_three_forms_of_a_step(tmp_path: Path) -> None:
    agent = batch_script(tmp_path, "a b", SITE, Shape(2, 2), request(), "requeue")
    assert "--node-rank $SLURM_NODEID" in agent and "--ntasks-per-node=1" in agent and "#SBATCH --requeue" in agent
    assert "--job-name=a-b" in agent and "#SBATCH --signal=B:USR1@60" in agent
    ranks = batch_script(tmp_path, "x", SITE, Shape(2, 2), request(per_rank=True), "chain")
    assert "--ntasks-per-node=2" in ranks and "--node-rank" not in ranks and "rank-%t.out" in ranks
    assert "#SBATCH --no-requeue" in ranks and "mode=chain" in ranks
    alone = batch_script(tmp_path, "x", SITE, Shape(1, 1), request(container="image.sif"), "once")
    assert "--node-rank" not in alone and "apptainer exec --nv image.sif python -P -m meshwright train" in alone
    for script in (agent, ranks, alone):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_layout_fills_nodes_or_part_of_one() -> None:
    def sized(ranks: int) -> LoadedJob:
        return load_job("demo", [f"layout.dp_replicate={ranks}", f"batch.global_batch={8 * ranks}"])

    assert shape_of(sized(2), find_site("vega")) == Shape(1, 2)
    assert shape_of(sized(8), find_site("vega")) == Shape(2, 4)
    with pytest.raises(UserError, match="do not fill whole nodes of vega"):
        shape_of(sized(6), find_site("vega"))


SECTIONS = {
    (): None,
    ("cluster.name=vega",): None,
    ("cluster.name=vega", "cluster.nodes=2"): None,
    ("cluster.name=vega", "cluster.gpus_per_node=4"): None,
    ("cluster.gpu=A100-40GB", "cluster.gpus_per_node=4"): None,
    ("cluster.name=meluxina", "cluster.nodes=2"): None,
    ("cluster.gpu=h100",): "cluster.gpu = h100, but vega has a100-40gb; plan it again with --cluster 2xvega, or set",
    ("cluster.gpu=h100", "cluster.gpus_per_node=8", "cluster.nodes=1"): "cluster.gpu = h100, but vega has a100-40gb;",
    ("cluster.name=leonardo",): "cluster.gpu = a100-64gb, but vega has a100-40gb",
    ("cluster.name=karolina",): "cluster.gpus_per_node = 8, but vega has 4, so ranks planned for one node would be on",
    (
        "cluster.gpus_per_node=8",
        "cluster.nodes=1",
    ): "cluster.gpus_per_node = 8, but vega has 4, so ranks planned for one node would be on several; plan it again",
    ("cluster.name=vega", "cluster.nodes=3"): "cluster.nodes = 3, but the layout's 8 ranks fill 2 of 4 GPUs each; set",
    (
        "cluster.name=vega",
        "cluster.gpus_per_node=8",
    ): "cluster.gpus_per_node = 8, but vega has 4; set it to that or leave",
    ("cluster.gpus_per_node=8", "cluster.nodes=2"): "cluster.nodes = 2, but the layout's 8 ranks fill 1 of 8 GPUs each",
    ("cluster.nodes=1",): "cluster.nodes = 1, but the layout's 8 ranks fill 2 of 4 GPUs each",
    ("cluster.name=vegan",): "cluster.name = vegan is neither a known site nor a profile file; use one of vega",
}


@pytest.mark.parametrize("said", SECTIONS)
def test_what_a_job_says_of_its_machines_must_agree_with_its_layout(said: tuple[str, ...]) -> None:
    """And with the site, if the section is of another one or of none."""
    job = load_job("demo", ["layout.dp_replicate=8", "batch.global_batch=64", *said])
    if (sentence := SECTIONS[said]) is None:
        assert shape_of(job, find_site("vega")) == Shape(2, 4)
        return
    with pytest.raises(UserError) as refused:
        shape_of(job, find_site("vega"))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_the_site_may_be_the_jobs_own(cli, tiny_job: Path) -> None:
    words = ["submit", "job.toml", "--time", "10", "--dry-run"]
    named = cli(*words, "--set", "cluster.name=vega")
    assert named.code == 0 and "on Vega" in named.out, named
    other = cli(*words, "--set", "cluster.name=vega", "--site", "karolina", "--account", "x")
    assert other.code == 0 and "on Karolina" in other.out, "what is asked for wins"
    refused = cli(*words)
    assert refused.code == 2 and "submit needs --site" in refused.err and len(refused.err.splitlines()) == 1


def test_dry_run_writes_nothing_and_mistakes_are_one_sentence(cli, tiny_job: Path) -> None:
    before = set(tiny_job.parent.iterdir())
    told = cli("submit", "job.toml", "--site", "vega", "--time", "10", "--dry-run", "--signal-before", "60", "--json")
    assert told.code == 0, told
    assert list(json.loads(told.out)["scripts"]) == ["slurm/run.sh"] and json.loads(told.out)["jobs"] == []
    for words, sentence in {
        ("--site", "nowhere"): "--site = nowhere is neither",
        ("--site", "lumi", "--time", "10"): "lumi needs --account",
        ("--site", "vega", "--time", "soon"): "--time = soon is not a duration",
        ("--site", "vega", "--time", "10", "--budget", "3"): "add --ladder",
    }.items():
        refused = cli("submit", "job.toml", *words)
        assert refused.code == 2 and sentence in refused.err and len(refused.err.splitlines()) == 1
    assert {path for path in tiny_job.parent.iterdir() if path.name != "cache"} == before


def test_dry_run_needs_no_disk_and_downloads_nothing(cli, tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    monkeypatch.setattr(lifecycle, "require_start", lambda *_: pytest.fail("weights are read"))
    words = ["submit", "job.toml", "--site", "vega", "--time", "10"]
    printed = cli(*words, "--dry-run")
    assert printed.code == 0 and "#SBATCH" in printed.out, printed
    refused = cli(*words)
    assert refused.code == 2 and "the disk has 0.00 GB free" in refused.err
    (tiny_job.parent / "run").mkdir()
    (tiny_job.parent / "run/file").touch()
    taken = cli(*words, "--dry-run")
    assert taken.code == 2 and 'run.folder = "run" exists' in taken.err


@pytest.mark.parametrize("form", [[], ["--per-rank"]])
def test_a_run_goes_on_with_another_layout(cli, tmp_path: Path, form: list[str]) -> None:
    """The script says it to the ranks, which write it down when they resume; a new run's folder says it already."""
    run_folder(tmp_path / "run")
    words = ["--site", "vega", "--time", "10", "--dry-run", *form]
    changes = ["--set", "layout.dp_replicate=2", "--set", 'data.sources=["a b"]']
    again = cli("submit", "run", *words, *changes)
    assert again.code == 0 and "--gpus-per-node=2" in again.out, again
    [line] = [line for line in again.out.splitlines() if "meshwright train" in line]
    inner = shlex.split(line)
    inner = shlex.split(inner[-1]) if inner[0] == "bash" else inner
    place = inner.index("--resume") + 1
    assert inner[place : place + 4] == changes
    assert subprocess.run(["bash", "-n"], input=again.out, text=True).returncode == 0
    assert "--set" not in cli("submit", "demo", *words, "--set", "run.folder=new").out


def test_a_refusal_of_sbatch_leaves_nothing(cli, tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder = tiny_job.parent / "bin"
    bin_folder.mkdir()
    (bin_folder / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2; exit 1\n")
    (bin_folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_folder))
    refused = cli("submit", "job.toml", "--site", "vega", "--time", "10")
    assert refused.code == 2 and "sbatch failed: error: Invalid account" in refused.err
    assert not (tiny_job.parent / "run").exists()


@pytest.mark.thorough
def test_a_run_in_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, start = "stop", ("start", {"attempt": 0})
    known: dict[str, SlurmJob | None] = {}
    monkeypatch.setattr(status_module, "job_state", lambda job: known.get(job))
    cases: dict[str, tuple[list[Any], SlurmJob | None, str]] = {
        "done": ([start, (stop, {"reason": "finished"})], SlurmJob("1", "COMPLETED"), "done"),
        "pending": ([], SlurmJob("1", "PENDING", "Priority"), "pending"),
        "running": ([start], SlurmJob("1", "RUNNING", nodes="n1"), "running"),
        "requeued": ([start], SlurmJob("1", "PENDING", "BeginTime", restarts=1), "requeued"),
        "failed": ([start, (stop, {"reason": "failed", "error": "ValueError: x"})], SlurmJob("1", "FAILED"), "failed"),
        "oom": ([start, (stop, {"reason": "failed", "error": "CUDA out of memory"})], SlurmJob("1", "FAILED"), "oom"),
        "host oom": ([start], SlurmJob("1", "OUT_OF_MEMORY"), "oom"),
        "timeout": ([start], SlurmJob("1", "TIMEOUT"), "timeout"),
        "out of jobs": ([start, (stop, {"reason": "interrupted"})], SlurmJob("1", "FAILED"), "timeout"),
        "scancel": ([start], SlurmJob("1", "CANCELLED"), "cancelled"),
        "scancel, saved": ([start, (stop, {"reason": "interrupted"})], SlurmJob("1", "CANCELLED"), "cancelled"),
        "full disk": (
            [start, (stop, {"reason": "failed", "error": "no space is left; make room"})],
            SlurmJob("1", "FAILED"),
            "failed",
        ),
        "killed later": (
            [start, (stop, {"reason": "failed", "error": "CUDA out of memory"}), start],
            SlurmJob("1", "NODE_FAIL"),
            "failed",
        ),
        "forgotten": ([start], None, "failed"),
    }
    for name, (events, job, word) in cases.items():
        run = tmp_path / "runs" / name
        run_folder(run, *events)
        (run / "slurm").mkdir()
        Submission("here", ("1",), 1, 1, 1, "10").write(run)
        known["1"] = job
        status = status_of(run)
        assert status.state == word and status.why, (name, status)
    local = tmp_path / "local"
    run_folder(local, start, (stop, {"reason": "interrupted"}))
    assert status_of(local).state == "stopped" and "--resume" in status_of(local).why
    assert len(statuses(tmp_path / "runs")) == len(cases)
    with pytest.raises(UserError, match="is not a run folder"):
        status_of(tmp_path)


def test_a_run_whose_trial_came_to_nothing_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm cancels the run itself then, which is not what happened."""
    run = tmp_path / "run"
    run_folder(run)
    run_folder(run / "ladder/1", ("start", {}), ("stop", {"reason": "failed", "error": "ValueError: x"}))
    (run / "slurm").mkdir()
    known = {"1": SlurmJob("1", "FAILED"), "2": SlurmJob("2", "CANCELLED")}
    monkeypatch.setattr(status_module, "job_state", known.get)
    Submission("here", ("2",), 1, 2, 1, "10", ladder=("1",)).write(run)
    assert (status_of(run).state, status_of(run).why) == ("failed", "the trial on 1 ended with failed: ValueError: x")
    known["1"] = SlurmJob("1", "CANCELLED")
    assert status_of(run).state == "cancelled", "by a person"
    known["1"] = SlurmJob("1", "FAILED")
    Submission("here", ("2",), 1, 2, 1, "10").write(run)
    assert status_of(run).state == "cancelled", "a ladder of an earlier submission says nothing of this one"


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Let these shell scripts be all there is of Slurm."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_slurm_that_does_not_answer_has_forgotten_nothing(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would be called failed, not be cancelled, and be submitted a second time."""
    run_folder(tmp_path / "run", ("start", {}))
    run_folder(tmp_path / "ended", ("start", {}), ("stop", {"reason": "finished"}))
    for name in ("run", "ended"):
        (tmp_path / name / "slurm").mkdir()
        Submission("here", ("1",), 1, 1, 1, "10").write(tmp_path / name)
    unreachable = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    programs(tmp_path / "down", monkeypatch, scontrol=f"echo '{unreachable}' >&2; exit 1")
    submitting = ("submit", "run", "--site", "vega", "--time", "10", "--dry-run")
    for words in (("status", "run"), ("status", "--all", "."), ("cancel", "run"), submitting):
        told = cli(*words)
        assert told.code == 2 and "Unable to contact slurm controller" in told.err and not told.out, words
    programs(tmp_path / "none", monkeypatch)
    told = cli("status", "run")
    assert told.code == 2 and "run this on a login node of the site\n" in told.err
    assert json.loads(cli("status", "ended", "--json").out)["state"] == "done", "known without Slurm"
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    programs(tmp_path / "forgetful", monkeypatch, scontrol=forgotten)
    assert json.loads(cli("status", "run", "--json").out)["state"] == "failed", "and there is no accounting"


def test_odd_names_reach_slurm_and_the_shell_as_they_are(tmp_path: Path) -> None:
    run = tmp_path / "it's 5% ü"
    script = batch_script(run, "x", SITE, Shape(1, 2), request(per_rank=True), "requeue")
    [line] = [line for line in script.splitlines() if "--output=" in line and line.startswith("#SBATCH")]
    output = f"--output={tmp_path}/it's 5%% ü/slurm/job-%j.out"
    assert shlex.split(line, comments=False)[1:] == [output], "Slurm takes %% for a percent sign"
    assert '--output="${run//%/%%}/logs/rank-%t.out"' in script
    with pytest.raises(UserError, match="Slurm interprets backslashes"):
        batch_script(tmp_path / "a\\b", "x", SITE, Shape(1, 1), request(), "requeue")
    loaded = load_job("demo", ["layout.dp_replicate=2", "batch.global_batch=16"])
    _, rung = make_rungs(loaded, run, SITE, Shape(1, 2), None, print)
    assert str(run / "ladder/1") in shlex.split(rung.judge)


def test_ranks_that_were_asked_to_end_and_saved_go_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a preemption Slurm may tell the ranks and not the script; a crash is told from that by its code."""
    path = os.environ["PATH"]
    script = batch_script(tmp_path / "run", "x", SITE, Shape(1, 1), request(), "requeue")
    (tmp_path / "run/slurm").mkdir(parents=True)
    for code, requeued in ((85, True), (1, False)):
        step = f'case "$*" in *train*) exit {code};; esac'
        refuses = f'[ $1 = ping ] && echo "Slurmctld(primary) at x is UP"; echo "$*" >{tmp_path}/asked; exit 1'
        programs(tmp_path / f"{code}", monkeypatch, srun=step, scontrol=refuses)
        ended = subprocess.run(
            ["/bin/bash", "-c", script], env={"PATH": f"{tmp_path}/{code}:{path}", "SLURM_JOB_ID": "7"}
        )
        assert ended.returncode == code and (tmp_path / "run/slurm/over").exists() is not requeued
        assert (tmp_path / "asked").exists() is requeued
        (tmp_path / "asked").unlink(missing_ok=True)


KILLED = dict.fromkeys(("grep", "tail", "sed", "awk", "cat"), "kill -9 $$")


@pytest.mark.parametrize(
    ("reason", "programs_then", "done"),
    [
        ("finished", {}, True),
        ("failed", {}, False),
        (None, {}, False),
        ("interrupted", {}, False),
        ("finished", KILLED, True),
        ("failed", KILLED, False),
        (None, KILLED, False),
    ],
)
def test_a_step_that_ends_with_0_is_done_only_if_the_run_can_be_seen_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str | None, programs_then: dict[str, str], done: bool
) -> None:
    """A step that is aborted with its node may end so, and programs that the script starts then are killed."""
    path = os.environ["PATH"]
    script = batch_script(tmp_path / "run", "x", SITE, Shape(1, 1), request(), "requeue")
    # The next attempt of a run that had been stopped.
    stops = [] if reason is None else [("stop", {"reason": reason})]
    run_folder(tmp_path / "run", ("start", {}), ("stop", {"reason": "interrupted"}), ("start", {}), *stops)
    (tmp_path / "run/slurm").mkdir()
    lost = 'case "$*" in *train*) exit 0;; esac; exit 1'
    programs(tmp_path / "bin", monkeypatch, srun=lost, scontrol="exit 0", sleep="exit 0", **programs_then)
    ended = subprocess.run(["/bin/bash", "-c", script], env={"PATH": f"{tmp_path}/bin:{path}", "SLURM_JOB_ID": "7"})
    assert ended.returncode == (0 if done else 85)
    assert (tmp_path / "run/slurm/over").exists() is done


def test_a_requeue_waits_for_a_controller_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.environ["PATH"]
    script = batch_script(tmp_path / "run", "x", SITE, Shape(1, 1), request(), "requeue")
    (tmp_path / "run/slurm").mkdir(parents=True)
    count = f'echo "$*" >>{tmp_path}/asked; grep -c requeue {tmp_path}/asked'
    back = f'[ $1 = ping ] && echo "Slurmctld(primary) at x is DOWN"; [ $({count}) -gt 3 ]'
    step = 'case "$*" in *train*) exit 85;; esac'
    programs(tmp_path / "bin", monkeypatch, srun=step, scontrol=back, sleep="exit 0")
    subprocess.run(
        ["/bin/bash", "-c", script], env={"PATH": f"{tmp_path}/bin:{path}", "SLURM_JOB_ID": "7"}, check=False
    )
    assert (tmp_path / "asked").read_text().count("requeue 7") == 4, "tried until it was heard"


def test_logs_of_a_job_that_waits(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed, they are waited for: here the job is gone when it is asked after again."""
    run_folder(tmp_path / "run")
    (tmp_path / "run/slurm").mkdir()
    Submission("here", ("1",), 1, 1, 1, "10").write(tmp_path / "run")
    waiting = iter([SlurmJob("1", "PENDING", "Priority")] * 2)

    def asked(job: str) -> SlurmJob:
        if (found := next(waiting, None)) is not None:
            return found
        (tmp_path / "run/slurm/job-1.out").write_text("step 1\n")
        return SlurmJob("1", "COMPLETED")

    monkeypatch.setattr(status_module, "job_state", asked)
    told = cli("logs", "run")
    assert told.code == 2 and "has no log yet" in told.err
    assert cli("logs", "run", "--follow").out == "step 1\n"


def test_logs_of_a_rank(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    (tmp_path / "run/logs").mkdir()
    (tmp_path / "run/logs/rank-1.err").write_text("trouble\n")
    assert [path.name for path in log_files(tmp_path / "run", 1)] == ["rank-1.err"]
    with pytest.raises(UserError, match=r"no log of rank 2 \(ranks with a log: 1\)"):
        log_files(tmp_path / "run", 2)


def test_a_trial_has_fewer_replicas_and_as_much_for_each(tmp_path: Path) -> None:
    loaded = load_job("demo", ["layout.dp_shard=4", "layout.tp=2", "batch.global_batch=32", "batch.micro_batch=2"])
    small = shrunk(loaded, 4, tmp_path / "trial").job
    assert (small.layout.dp_shard, small.layout.dp_replicate, small.layout.tp) == (2, 1, 2)
    assert small.accumulation == loaded.job.accumulation and small.run.steps == 20
    with pytest.raises(UserError, match="other axes need 2 ranks, and 1 is not a multiple"):
        shrunk(loaded, 1, tmp_path / "trial")


def test_a_trial_says_go_or_no(tmp_path: Path) -> None:
    finished = (("start", {}), ("stop", {"reason": "finished"}))
    quick, slow = tmp_path / "1", tmp_path / "2"
    for path, step_s in ((quick, 1.0), (slow, 9.0)):
        run_folder(path, *finished, rows=4, step_s=step_s)
        (path / "slurm").mkdir()
    told = verdict(quick, 1, 8, 3600, None, 10.0)
    assert told["go"] and told["gpu_hours_of_the_run"] == 8.0 and told["tokens_per_s_per_gpu"] == 100.0
    (quick / "slurm/verdict.json").write_text(json.dumps(told))
    assert not verdict(quick, 1, 8, 3600, None, 7.0)["go"]
    assert "down from 100" in verdict(slow, 2, 8, 3600, quick, None)["why"]
    failed = tmp_path / "3"
    run_folder(failed, ("start", {}), ("stop", {"reason": "failed"}), rows=4)
    assert verdict(failed, 1, 8, 10, None, None) == {"go": False, "why": "the trial is failed, not done"}


def test_a_trial_is_shorter_than_the_warm_up_it_came_from(tmp_path: Path) -> None:
    loaded = load_job("demo", ["schedule.warmup_steps=200", "layout.dp_shard=2", "batch.global_batch=16"])
    small = shrunk(loaded, 1, tmp_path / "trial").job
    assert (small.run.steps, small.warmup_steps) == (20, 10)


@pytest.mark.parametrize("jobs", ['["--user=me"]', "[5]", "5", '["1; id"]'])
def test_a_submission_names_jobs_and_nothing_else(cli, tmp_path: Path, jobs: str) -> None:
    """What stands there becomes a word of scancel."""
    run_folder(tmp_path / "run")
    (tmp_path / "run/slurm").mkdir()
    text = f'{{"site": "x", "jobs": {jobs}, "ladder": [], "nodes": 1, "ranks_per_node": 1, "chain": 1, "time": "1"}}'
    (tmp_path / "run/slurm/submission.json").write_text(text)
    refused = cli("cancel", "run")
    assert refused.code == 2 and "submission.json is damaged" in refused.err
