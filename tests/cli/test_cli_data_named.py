"""What trains has to name its data; a run that is continued has its own."""

import json
from pathlib import Path

import pytest
from command import Cli

import meshwright
from meshwright.errors import UserError
from meshwright.job import load_job, recipes
from meshwright.launch.ray_submit import submit as submit_to_ray

UNNAMED = """\
[model]
preset = "tiny-llama"
layers = 1
[batch]
sequence_length = 16
global_batch = 2
micro_batch = 2
[evaluation]
every_steps = 0
[run]
steps = 1
device = "cpu"
folder = "run"
"""
NAMED = ("--set", 'data.sources=["builtin:synthetic"]', "--set", "data.workers=0")
SENTENCE = "data.sources is not set; set it to the files, folders or addresses"


@pytest.fixture
def unnamed(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(UNNAMED)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("train",),
        ("train", "--nproc", "2", "--set", "layout.tp=2"),
        ("submit", "--site", "vega", "--time", "10", "--dry-run"),
        ("submit", "--on", "kubernetes", "--container", "i", "--volume", "v", "--dry-run"),
        ("submit", "--on", "ray"),
    ],
)
def test_a_training_without_named_data_is_refused(cli: Cli, unnamed: Path, words: tuple[str, ...]) -> None:
    refused = cli(words[0], "job.toml", *words[1:])
    assert refused.code == 2 and SENTENCE in refused.err and refused.err.count("\n") == 1
    assert not Path("run").exists()


def test_from_python_too(unnamed: Path) -> None:
    with pytest.raises(UserError, match=SENTENCE):
        meshwright.train(unnamed)
    with pytest.raises(UserError, match=SENTENCE):
        meshwright.train(meshwright.load_job("tiny-llama"))
    with pytest.raises(UserError, match=SENTENCE):
        submit_to_ray("job.toml", load_job(str(unnamed)))


def test_what_does_not_train_goes_on(cli: Cli, unnamed: Path) -> None:
    assert cli("plan", "--check", "job.toml", "--cluster", "1xh100", "--json").code == 0
    assert cli("job", "explain", "job.toml").code == 0


@pytest.mark.thorough
def test_a_run_is_continued_with_the_data_it_has(cli: Cli, unnamed: Path) -> None:
    """Also by a job file without data, as runs of versions in which it had a default have."""
    assert cli("train", "job.toml", "--resume").code == 2, "there is no run yet"
    assert " · synthetic tokens (builtin:synthetic) · " in cli("train", "job.toml", *NAMED).out
    resolved = json.loads(Path("run/job.resolved.json").read_text(encoding="utf-8"))
    assert resolved["data"]["sources"] == ["builtin:synthetic"]
    assert cli("train", "run", "--resume", "--set", "run.steps=2").code == 0
    assert SENTENCE not in cli("train", "job.toml", "--resume").err


def test_the_headline_names_the_data(cli: Cli, tiny_job: Path) -> None:
    words = ("--set", "run.steps=1", "--set", "evaluation.every_steps=0", "--set", "evaluation.sample_tokens=0")
    sources = [f"corpus/module_{number:02}.py" for number in range(4)]
    told = cli("train", "job.toml", *words, "--set", f"data.sources={sources}").out
    assert f" training tokens of {', '.join(sources[:3])} and 1 more · " in told


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe_names_its_data(recipe: str) -> None:
    assert "sources" in load_job(recipe).job.data.model_fields_set
