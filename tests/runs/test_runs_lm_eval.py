"""An exported folder in lm-evaluation-harness, as docs/preferences.md gives it one: with a task in a local file.

The harness brings many packages and is not installed for the tests; this runs where it is.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from meshwright.checkpoint import load_weights, newest_weights
from meshwright.data.tokenizer import load_tokenizer
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.model import Decoder
from meshwright.runs.huggingface import export_run

ROOT = Path(__file__).parents[2]
JOB = """
[model]
preset = "tiny-llama"
vocab_size = 300
layers = 1
[data]
sources = ["{path}/pairs.jsonl"]
format = "preferences"
cache = "{path}/cache"
workers = 0
[batch]
sequence_length = 96
global_batch = 2
micro_batch = 2
[evaluation]
every_steps = 0
[run]
steps = 2
device = "cpu"
folder = "{path}/run"
"""
PAIRS = [
    {"prompt": f"Say {n}.", "chosen": f" {n}{'a' * (n % 4)}", "rejected": f" {n}{'b' * ((3 * n + 1) % 4)}"}
    for n in range(40)
]
"""A model that has hardly learned prefers the shorter answer, which is the chosen one in half of them."""


def task_in_docs() -> str:
    """The task file that the page shows."""
    page = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    [task] = [block for block in page.split("```text\n") if block.startswith("task: say")]
    return task.partition("```")[0]


def command_in_docs() -> list[str]:
    page = (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")
    [line] = [line for line in page.splitlines() if line.startswith("lm_eval ")]
    return line.split()[1:]


def test_the_harness_finds_the_accuracy_that_our_own_probabilities_give(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    (tmp_path / "job.toml").write_text(JOB.format(path=tmp_path))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "say.yaml").write_text(task_in_docs())
    loaded = load_job(str(tmp_path / "job.toml"))
    run_job(loaded, Console(quiet=True))
    export_run(tmp_path / "run", tmp_path / "dpo-hf", "fp32")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "lm_eval", *command_in_docs(), "--output_path", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [results] = tmp_path.glob("found*.json")
    found = json.loads(results.read_text())["results"]["say"]["acc,none"]

    model = Decoder(loaded.job.model)
    load_weights(newest_weights(tmp_path / "run"), model)
    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer.json", "tokenizer.json")

    def log_probability(prompt: str, answer: str) -> float:
        tokens = torch.tensor([tokenizer.encode(prompt + answer)])
        first = len(tokenizer.encode(prompt))
        with torch.no_grad():
            logs = model(tokens).log_softmax(-1)[0]
        return float(sum(logs[place - 1, tokens[0, place]] for place in range(first, tokens.shape[1])))

    better = [log_probability(p["prompt"], p["chosen"]) > log_probability(p["prompt"], p["rejected"]) for p in PAIRS]
    assert 0 < sum(better) < len(PAIRS)  # else any model would do
    assert found == pytest.approx(sum(better) / len(PAIRS))
