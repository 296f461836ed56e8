"""A run whose model's own sharding table is wrong ends with the sentence that `verify` gives, and no other does."""

import os
import subprocess
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.launch.failures import table_errors_explained
from meshwright.train import Activity

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "docs/examples/parallel_block.py").read_text()
RIGHT, WRONG = '"layers.*.mix.o": "row"', '"layers.*.mix.o": "column"'
JOB = """
[model]
file = "own.py"
vocab_size = 300
width = 32
heads = 4
kv_heads = 2
layers = 2
max_sequence_length = 64

[data]
sources = ["builtin:synthetic"]
workers = 0

[batch]
sequence_length = 32
global_batch = 2
micro_batch = 1

[layout]
tp = 2

[run]
steps = 1
device = "cpu"
folder = "run"
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(EXAMPLE.replace(RIGHT, WRONG))
    (tmp_path / "own.toml").write_text(JOB)
    return load_job("own.toml", []).job


@pytest.mark.usefixtures("job")
def test_the_wrong_line_is_named_and_nothing_else_is_printed(tmp_path: Path, warm_command: Path) -> None:
    assert EXAMPLE.count(RIGHT) == 1
    command = [str(warm_command / "meshwright"), "train", "own.toml", "--nproc", "2", "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == "", done
    assert f"SHARDING[{WRONG.replace(': ', '] = ')}" in done.stderr and done.stderr.endswith("correct this line\n")


def raised(job: Job, error: Exception, phase: str = "forward and backward", steps: int = 1) -> Exception:
    """What is raised for an error in some step of an attempt."""
    activity = Activity()
    activity.at("reading data", 1)
    activity.at("reading data", steps)
    activity.at(phase)
    with pytest.raises(type(error)) as found, table_errors_explained(job, activity):
        raise error
    return found.value


def test_only_errors_that_the_table_can_have_caused_are_explained(job: Job) -> None:
    activity = Activity()
    activity.at("forward and backward", 1)
    sentence = r"sharded by SHARDING over layout\.tp = 2 ranks, the backward fails"
    with pytest.raises(UserError, match=sentence), table_errors_explained(job, activity):
        raise RuntimeError("shapes differ")
    for error in (OSError("disk"), UserError("a field"), RuntimeError("Connection closed by peer")):
        assert raised(job, error) is error
    late = RuntimeError("shapes differ")
    assert raised(job, late, steps=2) is late  # the table has worked before
    assert raised(job, late, phase="reading data") is late
    whole = job.model_copy(update={"layout": job.layout.model_copy(update={"tp": 1})})
    assert raised(whole, late) is late


def test_a_model_that_fails_without_its_table_is_not_failed_by_it(job: Job) -> None:
    Path("own.py").write_text(EXAMPLE.replace("torch.relu(self.up(x)).square()", "torch.relu(self.up(x)).sqare()"))
    error = AttributeError("no attribute 'sqare'")
    assert raised(job, error) is error
