"""Every recipe loads as it is and, shrunk to a CPU's size, trains along its golden loss curve.

python tests/recipes/test_recipes.py      writes the golden curves anew, after a change that is meant to move them
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

from meshwright.job import load_job, recipes
from meshwright.launch.worker import run_job

GOLDEN = Path(__file__).parent / "golden"
# The structure of the recipe stays (preset, ties, precision, schedule, masks, memory); sizes and data become small and
# fixed, and ranks one: what a layout computes is `verify`'s to hold.
SHRUNK = [
    "model.vocab_size=300", "model.width=32", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.head_dim=8",
    "model.ffn_width=64", "batch.sequence_length=32", "batch.global_batch=4", "batch.micro_batch=2",
    "schedule.warmup_steps=2", "evaluation.every_steps=0", "run.device=cpu", "run.compile=false", "run.steps=8",
    "data.workers=0", "layout.dp_shard=1", "layout.tp=1",
]  # fmt: skip
EXPERTS = ["model.experts.count=4", "model.experts.top_k=2", "model.experts.ffn_width=16"]
BLOCKS = ["model.width=64", "model.head_dim=16"]
"""Rows of a base in 4 bits consist of blocks of 64 numbers."""
VISION = ["model.vision.width=16", "model.vision.layers=1", "model.vision.heads=2", "model.vision.ffn_width=32"]
AUDIO = [field.replace("vision", "audio") for field in VISION]
# Other CPUs order their sums differently, and 16 bits round away more of it.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}


def losses(name: str, folder: Path) -> list[float]:
    sources = ["data.sources=[" + json.dumps(str(folder / "text.txt")) + "]", f"data.cache={folder / 'cache'}"]
    (folder / "text.txt").write_text("\n".join(f"line {i} of {i * i} words and {i % 7} more" for i in range(400)))
    job = load_job(name).job
    data = job.data
    if data.sources in (("builtin:synthetic",), ("builtin:shapes",), ("builtin:tones",)):
        sources = []
    if data.format == "conversations":
        talks = ({"prompt": f"after {i} comes", "completion": f" {i + 1} and no other"} for i in range(400))
        (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, talks)))
        sources[0] = "data.sources=[" + json.dumps(str(folder / "talk.jsonl")) + "]"
    if data.format == "preferences":
        pairs = ({"prompt": f"{i}:", "chosen": f" {i + 1}", "rejected": f" {i}!"} for i in range(400))
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        sources[0] = "data.sources=[" + json.dumps(str(folder / "pairs.jsonl")) + "]"
        sources.append("optimizer.lr=3e-3")  # with the recipe's own a small model would not move in so few steps
    fewer = EXPERTS if job.model.experts else VISION if job.model.vision else AUDIO if job.model.audio else []
    if job.model.adapter and job.model.adapter.base == "nf4":
        fewer = BLOCKS
    if job.schedule.decay_steps:
        fewer = [*fewer, "schedule.decay_steps=4"]
    loaded = load_job(name, [*SHRUNK, *fewer, *sources, f"run.folder={folder / name}"])
    run_job(loaded, Console(quiet=True))
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.thorough
@pytest.mark.parametrize("name", recipes())
def test_the_recipe_follows_its_golden_curve(name: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    tolerance = TOLERANCE[load_job(name).job.precision.format]
    assert losses(name, tmp_path) == pytest.approx(golden["losses"], rel=tolerance)


def test_no_golden_curve_without_its_recipe() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(recipes())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for recipe in recipes():
        with tempfile.TemporaryDirectory() as scratch:
            curve = {"torch": torch.__version__, "losses": losses(recipe, Path(scratch))}
        (GOLDEN / f"{recipe}.json").write_text(json.dumps(curve, indent=2) + "\n")
        sys.stdout.write(f"{recipe}: {curve['losses'][0]:.4f} → {curve['losses'][-1]:.4f}\n")
