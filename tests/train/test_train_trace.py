"""Traces of single steps: what is in the files, which steps, which ranks, and that tracing never ends a run."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.parallel import OneStage
from meshwright.runs.traces import traces_of
from meshwright.train import TraceSteps
from meshwright.train import trace as tracing

SMALL = ["run.steps=4", "evaluation.every_steps=3", "evaluation.sample_tokens=0", "checkpoint.every_steps=2"]


def settings(*words: str) -> list[str]:
    return [each for word in (*SMALL, *words) for each in ("--set", word)]


class Ranges:
    """The named ranges of a trace, with what is inside what by time and thread."""

    def __init__(self, path: Path) -> None:
        content = json.loads(gzip.decompress(path.read_bytes()))
        self.facts: dict[str, Any] = content["meshwright"]
        self.all = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        self.named = [event for event in self.all if event.get("cat") == "user_annotation"]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.named if event["name"] == name]

    def starting(self, words: str) -> list[str]:
        return [event["name"] for event in self.named if event["name"].startswith(words)]

    def inside(self, inner: dict[str, Any], outer: dict[str, Any]) -> bool:
        ends = inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3
        return bool(inner["tid"] == outer["tid"] and inner["ts"] >= outer["ts"] and ends)

    def each_inside(self, inner: str, outer: str) -> bool:
        return all(any(self.inside(one, other) for other in self.of(outer)) for one in self.of(inner))


@pytest.mark.thorough
def test_two_ranks_write_the_steps_they_were_asked_for(cli, tiny_job: Path, tmp_path: Path) -> None:
    result = cli("train", "job.toml", *settings("layout.dp_shard=2"), "--nproc", "2", "--trace", "2-3")
    assert result.code == 0, result.err
    files = [f"run/traces/attempt-0-steps-2-3-rank-{rank}.json.gz" for rank in (0, 1)]
    for rank, file in enumerate(files):
        ranges = Ranges(tmp_path / file)
        assert ranges.facts == {"rank": rank, "ranks": 2, "attempt": 0, "steps": [2, 3]}
        assert ranges.starting("step ") == ["step 2", "step 3"]
        counts = {"data": 2, "forward and backward": 2, "forward": 2, "backward": 2, "reduce": 2, "update": 2}
        counts |= {"clip": 2, "optimizer": 2, "record": 2, "evaluation": 1}
        # Once for every step, since the loop asks after each whether one is due.
        counts |= {"checkpoint": 2}
        assert {name: len(ranges.of(name)) for name in counts} == counts
        for inner, outer in (
            ("forward", "forward and backward"),
            ("backward", "forward and backward"),
            ("clip", "update"),
            ("optimizer", "update"),
        ):
            assert ranges.each_inside(inner, outer), f"{inner} in {outer}"
        for block in (0, 1):
            held_out = [ranges.inside(event, ranges.of("evaluation")[0]) for event in ranges.of(f"block {block}")]
            trained = [any(ranges.inside(e, f) for f in ranges.of("forward")) for e in ranges.of(f"block {block}")]
            assert sum(trained) == 2 and sum(held_out) == len(trained) - 2 >= 1
        phases = ("data", "forward and backward", "reduce", "update", "record", "checkpoint", "evaluation")
        for step in (2, 3):
            [whole] = ranges.of(f"step {step}")
            parts = [event for name in phases for event in ranges.of(name) if ranges.inside(event, whole)]
            parts.sort(key=lambda event: event["ts"])
            assert [event["name"] for event in parts][:5] == list(phases[:5])
            assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in pairwise(parts))
            assert 0.5 * whole["dur"] < sum(event["dur"] for event in parts) <= whole["dur"]
        [after] = ranges.of("evaluation")
        assert ranges.inside(after, ranges.of("step 3")[0]), "evaluation is due after step 3"
        products = [event for event in ranges.all if event["name"] == "aten::mm"]
        assert any(ranges.inside(event, block) for event in products for block in ranges.of("block 0"))
    page = (tmp_path / "run/report.html").read_text()
    assert all(f'href="traces/{Path(file).name}"' in page for file in files)
    told = json.loads(cli("report", "run", "--out", "elsewhere.html", "--json").out)
    assert told["traces"] == files
    assert all(f'href="{file}"' in (tmp_path / "elsewhere.html").read_text() for file in files)
    command = json.loads((tmp_path / "run/environment.json").read_text())["argv"]
    assert command[command.index("--trace") + 1] == "2-3"


@pytest.mark.thorough
def test_a_resumed_run_adds_its_traces_and_names_what_it_cannot_trace(cli, tiny_job: Path, tmp_path: Path) -> None:
    result = cli("train", "job.toml", *settings(), "--trace", "4", "--json")
    before = traces_of(tmp_path / "run")
    assert json.loads(result.out)["traces"] == ["run/traces/attempt-0-steps-4-4-rank-0.json.gz"]
    assert [path.name for path in before] == ["attempt-0-steps-4-4-rank-0.json.gz"]
    content = before[0].read_bytes()
    again = cli("train", "run", "--resume", "--set", "run.steps=6", "--trace", "3-5")
    assert again.code == 0, again.err
    assert [path.name for path in traces_of(tmp_path / "run")] == [
        "attempt-0-steps-4-4-rank-0.json.gz",
        "attempt-1-steps-5-5-rank-0.json.gz",
    ]
    assert before[0].read_bytes() == content
    past = cli("train", "run", "--resume", "--set", "run.steps=7", "--trace", "2-3")
    assert past.code == 0 and "no trace of steps 2-3: this attempt continues after step 6" in past.out


@pytest.mark.thorough
def test_a_rewound_step_is_traced_in_the_attempt_that_repeats_it(
    cli, tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, bad = OneStage.accumulate, [3]

    def accumulate(engine: Any, data: Any, step: int) -> Any:
        loss = whole(engine, data, step)
        return loss * float("nan") if bad and bad[0] == step and bad.pop() else loss

    monkeypatch.setattr(OneStage, "accumulate", accumulate)
    result = cli("train", "job.toml", *settings("run.on_bad_step=rewind"), "--trace", "2-4")
    assert result.code == 0, result.err
    [path] = traces_of(tmp_path / "run")
    assert path.name == "attempt-1-steps-3-4-rank-0.json.gz"
    assert Ranges(path).facts["steps"] == [3, 4]


@pytest.mark.thorough
def test_a_trace_changes_no_number(cli, tiny_job: Path, tmp_path: Path) -> None:
    runs = {}
    for name, words in {"plain": [], "traced": ["--trace", "2-3"]}.items():
        assert cli("train", "job.toml", *settings(f"run.folder={name}"), *words).code == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        runs[name] = [(row["step"], row.get("loss"), row.get("val_loss")) for row in rows]
    assert runs["plain"] == runs["traced"]


@pytest.mark.thorough
def test_a_pipeline_names_every_micro_batch_and_stage(cli, tiny_job: Path, tmp_path: Path) -> None:
    words = settings("layout.pp=2", "layout.schedule=1f1b", "model.tied=false", "batch.micro_batch=2")
    result = cli("train", "job.toml", *words, "--nproc", "2", "--trace", "2")
    assert result.code == 0, result.err
    for rank, path in enumerate(traces_of(tmp_path / "run")):
        ranges = Ranges(path)
        for kind in ("forward", "backward"):
            assert sorted(ranges.starting(f"{kind} 0,") + ranges.starting(f"{kind} 1,")) == [
                f"{kind} {micro_batch}, stage {rank}" for micro_batch in (0, 1)
            ]
        assert len(ranges.of(f"block {rank}")) == 2 and not ranges.of(f"block {1 - rank}")


@pytest.mark.parametrize("broken", ["folder", "disk", "cut", "profiler"])
def test_a_trace_that_cannot_be_written_is_a_warning(
    cli, tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "folder":
        monkeypatch.setattr(tracing.Path, "mkdir", _refusing(tracing.Path.mkdir))
    elif broken == "disk":  # torch's writer does not say so
        monkeypatch.setattr(tracing.profile, "export_chrome_trace", lambda _, path: Path(f"{path}.tmp").write_text("{"))
    elif broken == "cut":
        monkeypatch.setattr(tracing.profile, "export_chrome_trace", lambda _, path: Path(path).write_text('{"a": ['))
    else:
        monkeypatch.setattr(tracing, "profile", _failing)
    result = cli("train", "job.toml", *settings(), "--trace", "2-3")
    assert result.code == 0, result.err
    assert "no trace of steps 2-3 (" in result.out and "training continues" in result.out
    assert not list((tmp_path / "run").glob("traces/*")) and not list((tmp_path / "run").rglob("*.new*"))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert "<h2>Traces" not in (tmp_path / "run/report.html").read_text()


def _refusing(mkdir: Any) -> Any:
    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "traces":
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *args, **kwargs)

    return refuse


def _failing(**_: Any) -> Any:
    raise RuntimeError("no profiler here")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trace", "soon"], "--trace soon is no range of steps; write it like 10-12, or 10 for one step"),
        (["--trace", "0-2"], "--trace 0-2 is not within the steps of the job; give some from 1 to 4"),
        (["--trace", "3-2"], "--trace 3-2 ends before it begins; write it as 2-3"),
        (["--trace", "4-5"], "--trace 4-5 is not within"),
        (["--trace", "5", "--nproc", "2", "--set", "layout.dp_shard=2"], "give some from 1 to 4"),
        (["--trace", "1-101", "--set", "run.steps=500"], "--trace 1-101 is 101 steps; trace at most 100"),
        (["--nvtx"], "--nvtx marks the steps of --trace for nsys; add --trace STEPS"),
        (["--trace", "2", "--nvtx"], "needs an NVIDIA GPU; the job runs on cpu, so leave it out"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_anything_is_written(
    cli, tiny_job: Path, tmp_path: Path, words: list[str], sentence: str
) -> None:
    result = cli("train", "job.toml", *settings(), *words)
    assert result.code == 2 and sentence in result.err
    assert not (tmp_path / "run").exists()


def test_steps_that_overlap_are_not_traced(cli, tiny_job: Path) -> None:
    loaded = load_job(
        "job.toml", ["layout.pp=2", "layout.schedule=pipedream", "model.tied=false", "batch.micro_batch=4"]
    )
    with pytest.raises(UserError, match=r'layout\.schedule = "pipedream" overlaps'):
        TraceSteps.parse("2", loaded.job)


def test_nsys_gets_the_same_ranges(cli, tiny_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: torch's calls are replaced by a list."""
    open_ranges, seen = [], []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            open_ranges.append(self.name)
            seen.append("/".join(open_ranges))

        def __exit__(self, *_: object) -> None:
            assert open_ranges.pop() == self.name, "ranges of NVTX are a stack"

    monkeypatch.setattr(torch.cuda.nvtx, "range", Range)
    monkeypatch.setattr(torch.cuda.profiler, "profile", lambda: Range("capture"))
    monkeypatch.setattr("meshwright.launch.worker.require_nvtx", lambda device: None)
    result = cli("train", "job.toml", *settings(), "--trace", "3", "--nvtx")
    assert result.code == 0, result.err
    assert not open_ranges and not traces_of(tmp_path / "run")
    assert seen[:3] == ["capture", "capture/step 3", "capture/step 3/data"]
    assert "capture/step 3/forward and backward/forward/block 1" in seen
    assert "capture/step 3/update/optimizer" in seen and "capture/step 3/evaluation" in seen
