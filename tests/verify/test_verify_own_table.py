"""A wrong sharding table of one's own model: one sentence that names its line, or the first gradient that differs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
EXAMPLE = Path(ROOT) / "docs/examples/parallel_block.py"
JOB = """
[model]
vocab_size = 300
width = 32
heads = 4
kv_heads = 2
layers = 2
max_sequence_length = 64

[batch]
sequence_length = 32
global_batch = 2
micro_batch = 1

[evaluation]
every_steps = 0

[layout]
tp = 2
"""
WRONG = {
    "a row that ends nothing": ('"layers.*.mix.up": "column"', '"layers.*.mix.up": "row"', "its outputs are"),
    "a column where a row is due": ('"layers.*.mix.down": "row"', '"layers.*.mix.down": "column"', "its inputs are"),
    "a column as wide as a row": ('"layers.*.mix.o": "row"', '"layers.*.mix.o": "column"', "it fails there ("),
    "a row at the entry": (
        '"layers.*.mix.q": "column"',
        '"layers.*.mix.q": "row"',
        "the first projection of",
    ),
    "no entry": ('"layers.*.mix": "gather",\n', "", "no module around it has the role gather"),
    "a norm of heads": ('"layers.*.norm": "norm"', '"layers.*.norm": "head-norm"', "it fails there ("),
    "a norm as a table": ('"layers.*.norm": "norm"', '"layers.*.norm": "positions"', "is for nn.Embedding"),
    "of another kind": (
        '"layers.*.norm": "norm"',
        '"layers.*.norm": "row"',
        "layers.0.norm is a RMSNorm",
    ),
}


def verified(cli, tmp_path: Path, text: str):
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "own.toml").write_text(JOB)
    return cli("verify", "own.toml", "--set", f"model.file={tmp_path / 'own.py'}")  # references are kept by this name


@pytest.mark.thorough
@pytest.mark.parametrize("case", WRONG)
def test_the_wrong_line_is_named(cli, tmp_path: Path, case: str) -> None:
    right, wrong, why = WRONG[case]
    text = EXAMPLE.read_text()
    assert text.count(right) == 1
    refused = verified(cli, tmp_path, text.replace(right, wrong))
    line = wrong.replace(": ", "] = ") if wrong else '"layers.*.mix.q"] = "column"'
    assert refused.code == 2 and len(refused.err.splitlines()) == 1, refused
    assert f"SHARDING[{line}" in refused.err and why in refused.err and refused.err.endswith("correct this line\n")


def test_torch_prints_nothing_besides(tmp_path: Path) -> None:
    """In a process of its own: ranks and what torch logs in them write past this one's capture."""
    right, wrong, _ = WRONG["a column as wide as a row"]
    (tmp_path / "own.py").write_text(EXAMPLE.read_text().replace(right, wrong))
    (tmp_path / "own.toml").write_text(JOB)
    command = [sys.executable, "-m", "meshwright", "verify", "own.toml", "--set", "model.file=own.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == "", done


@pytest.mark.thorough
def test_a_model_that_fails_in_one_process_too_is_not_failed_by_its_table(cli, tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("torch.relu(self.up(x)).square()", "torch.relu(self.up(x)).sqare()")
    failed = verified(cli, tmp_path, text)
    assert failed.code == 1 and "has no attribute 'sqare'" in failed.err and "SHARDING" not in failed.err
