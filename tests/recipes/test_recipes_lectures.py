"""The lectures' three recipes, as written and as recommended: planned, verified and, on CPU processes, trained."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.job import Job, load_job
from meshwright.job.devices import Segments
from meshwright.job.text import job_text
from meshwright.launch.worker import run_job
from meshwright.ranks import find_place
from meshwright.verify import run_ranks, shrink

ONE = ["layout.dp_shard=2", "batch.global_batch=4", "batch.micro_batch=2"]
TWO = ["layout.dp_shard=2", "layout.tp=2", "batch.global_batch=4", "batch.micro_batch=1"]
THREE = ["batch.global_batch=4", "batch.micro_batch=1"]
"""Two and four ranks, not the four and sixteen that `verify` makes of 4 and 8 × 8; accumulation stays one or more."""
RECIPES: dict[str, tuple[str, list[str], list[str]]] = {
    "1 as written": ("lecture-1-7b-4xa100", [], ONE),
    "1 as recommended": ("finetune-7b-4xa100", ["memory.recompute=selective", "layout.zero=3"], ONE),
    "2 as written": ("lecture-2-70b-64xh100", [], TWO),
    "2 as recommended": ("pretrain-70b-64xh100", [], TWO),
    "3 as written": ("lecture-3-10b-2xrtx3090", [], THREE),
    "3 as recommended": ("10b-2xrtx3090", [], THREE),
}
"""A job, what the recommendation changes in it, and its ranks and batch here."""


@pytest.mark.parametrize(
    ("which", "changes", "verdict"),
    [
        ("1 as written", [], "fits with 37.2 GiB to spare"),
        ("1 as written", ["cluster.gpu=a100-40gb"], "does not fit: 2.8 GiB over"),
        ("1 as recommended", [], "fits with 8.8 GiB to spare"),
        ("2 as written", [], "does not fit: 128.9 GiB over"),
        ("2 as written", ["batch.micro_batch=32"], "does not fit: 34.1 GiB over"),
        ("2 as written", ["batch.micro_batch=16"], "fits with 13.3 GiB to spare"),  # the smallest change that does
        ("2 as recommended", [], "fits with 11.7 GiB to spare"),
        ("3 as written", [], "fits with 15.7 GiB to spare"),
        ("3 as recommended", [], "fits with 15.9 GiB to spare"),
    ],
)
def test_its_plan_says_whether_it_fits(cli, which: str, changes: list[str], verdict: str) -> None:
    name, recommended, _ = RECIPES[which]
    result = cli("plan", "--check", name, *(f"--set={change}" for change in [*recommended, *changes]))
    assert result.code == 0 and verdict in result.out, result.out + result.err


@pytest.mark.thorough
@pytest.mark.parametrize("which", RECIPES)
def test_it_computes_what_one_process_does(cli, which: str) -> None:
    name, recommended, fewer = RECIPES[which]
    settings = [f"--set={change}" for change in [*recommended, *fewer]]
    result = cli("verify", name, *settings, "--steps", "1", "--json")
    answer = json.loads(result.out)
    compute = load_job(name).job.precision.format
    assert result.code == 0 and answer["equal"] is True
    assert {row["format"] for row in answer["rows"]} == {None, compute}  # float64, then its own
    # What the check replaces is said: the device that states would leave, and blocks that GPUs would compile.
    replaced = ["memory.offload"] * (name[-4:] == "3090") + ["run.compile"] * ("recommended" in which)
    assert [note.partition(" ")[0] for note in answer["could_hide_errors"]] == replaced


def train(job: str) -> list[float]:
    place = find_place(os.environ)
    assert place is not None
    finished = run_job(load_job(job), Console(quiet=True), place)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert finished.outcome.reason == "finished"
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.thorough
@pytest.mark.parametrize("which", RECIPES)
def test_it_learns(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrunk as verify does, but in its own format, with text to learn from and a second segment of layers."""
    monkeypatch.chdir(tmp_path)
    name, recommended, fewer = RECIPES[which]
    whole = load_job(name, [*recommended, *fewer]).job
    small = shrink(whole, steps=3)[0].model_dump(exclude_unset=True)
    sums = [{"text": f"{number} and {number + 1} make {2 * number + 1}"} for number in range(400)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, sums)))
    small["data"] |= {"sources": ("text.jsonl",), "cache": "cache", "format": "text", "workers": 0}
    recompute = whole.memory.recompute
    small["model"] |= {"vocab_size": 300, "layers": 1 + (recompute.segments if isinstance(recompute, Segments) else 1)}
    small["optimizer"] |= {"lr": 3e-2, "eps": 1e-8}
    small["precision"] = whole.precision
    small["run"] |= {"folder": "run", "on_bad_step": "stop"}
    (tmp_path / "job.toml").write_text(job_text(Job.model_validate(small), which))
    layout = whole.layout
    for losses in run_ranks(train, layout.dp_shard * layout.tp, "job.toml"):
        assert len(losses) == 3 and losses[-1] < losses[0] - 0.3, losses
