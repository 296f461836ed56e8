"""Jobs from files, presets, run folders and other jobs, changed in Python as on the command line."""

from pathlib import Path

import pytest

import meshwright
from meshwright.errors import UserError
from meshwright.job import load_job as load_file


def test_a_file_is_the_command_line_s_job(tiny_job: Path) -> None:
    job = meshwright.load_job(tiny_job, set=["run.steps=7", "optimizer.lr=1e-3"])
    assert job == load_file(str(tiny_job), ["run.steps=7", "optimizer.lr=1e-3"]).job
    assert job == meshwright.load_job(tiny_job, set={"run.steps": 7, "optimizer.lr": 1e-3})


def test_a_preset_is_a_job_too() -> None:
    job = meshwright.load_job("gpt2", set={"batch.micro_batch": 2})
    assert (job.model.preset, job.model.width, job.batch.micro_batch) == ("gpt2", 768, 2)
    assert meshwright.load_job(job, set={"model.preset": "gpt2-medium"}).model.width == 1024
    assert meshwright.load_job("tiny-llama").batch.sequence_length == 128


def test_a_job_is_changed_by_making_another(tiny_job: Path) -> None:
    job = meshwright.load_job(tiny_job)
    other = meshwright.load_job(job, set={"layout.dp_shard": 2, "memory.recompute": {"every": 2}})
    assert (job.layout.dp_shard, other.layout.dp_shard, other.memory.recompute) == (1, 2, other.memory.recompute)
    assert other.run == job.run and meshwright.load_job(other) == other


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"run.stepz": 3}, "--set: run.stepz is not a known setting; did you mean run.steps"),
        ({"run.steps": "3"}, '--set: run.steps = "3" is not allowed; it should be a whole number'),
        ({"steps": 3}, "--set steps is not section.field=value; write for example"),
        ({"optimizer.name": "adamx"}, '--set: optimizer.name has "adamx", which is not known; choose one of adamw, '),
        ({"schedule.name": "cos"}, '--set: schedule.name has "cos", which is not known; choose one of cosine, wsd, '),
        ({"model.loss": "mse"}, '--set: model.loss has "mse", which is not known; choose one of cross-entropy'),
        ({"log.sinks": ["mlfow"]}, '--set: log.sinks has "mlfow", which is not known; choose one of wandb, '),
    ],
)
def test_mistakes_are_named(tiny_job: Path, given: dict[str, object], sentence: str) -> None:
    for source in (tiny_job, meshwright.load_job(tiny_job)):
        with pytest.raises(UserError) as caught:
            meshwright.load_job(source, set=given)
        assert str(caught.value).startswith(sentence)


def test_what_is_no_job_is_named() -> None:
    with pytest.raises(UserError, match="5 is of type int, not a job; give a job, a job file"):
        meshwright.verify(5)  # type: ignore[arg-type]
