"""Losses of every way to compute a step, over some hundred steps of the same real text, next to those of a plain one.

    python benchmarks/loss_paths.py [--before FOLDER] [--flash4 PATHS] [--steps N] [--only TEXT] [--out FILE]
    python benchmarks/loss_paths.py --small          # on a CPU, a small model in fp32: shows that it runs

12 layers × 768, S 1024, 16 sequences a step, a vocabulary of 8192, Python's library as text, compiled blocks in bf16;
each path is a `meshwright train` of its own over the same batches. Paths:

    before         another checkout's code (`git archive COMMIT meshwright | tar x -C FOLDER`)
    graph          run.cuda_graph = true
    flash-4        FlashAttention-4, whose packages are at --flash4 (as in PYTHONPATH); all others run without it
    fp8, …         precision.compute = fp8 by tensor, by row, by block, and with the head

A path that did not do what its name says (no graph captured, another attention kernel) counts as failed.

Printed: the difference of the mean losses of all steps and of the last 50, the mean and the largest of the steps' own
differences, and which attention kernel was used. The bounds are 0.01 in the mean, 0.02 for fp8: above, the command
fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAST = 50
JOB = """
[model]
vocab_size = 8192
width = 768
layers = 12
heads = 12
ffn_width = 2048
max_sequence_length = 1024
[data]
sources = ["builtin:stdlib"]
[batch]
sequence_length = 1024
global_batch = 16
micro_batch = 16
[optimizer]
lr = 6e-4
[precision]
compute = "bf16"
[evaluation]
every_steps = 0
[checkpoint]
every_steps = 0
[run]
compile = true
"""
SMALL = [
    *("model.vocab_size=512", "model.width=32", "model.layers=1", "model.heads=2", "model.ffn_width=64"),
    *("batch.sequence_length=32", "batch.global_batch=2", "batch.micro_batch=2", "precision.compute=fp32"),
    *("run.compile=false", 'run.device="cpu"', "data.workers=0"),
]
FP8 = {
    "fp8, tensor": [],
    "fp8, row": ["precision.fp8_scales=row"],
    "fp8, block": ["precision.fp8_scales=block"],
    "fp8, head": ["precision.fp8_head=true"],
}
Row = dict[str, Any]


def main() -> None:
    """Train the plain path and each other one, compare, and write."""
    asked = parse()
    print(__doc__)
    plain = trained([], asked)
    results: dict[str, Row] = {"plain": plain}
    for name, fields, packages in paths(asked):
        found = trained(fields, asked, packages)
        results[name] = found | compared(plain["losses"], found["losses"], 0.02 if "fp8" in name else 0.01)
        if (name == "flash-4" and found["attention"] != "flash-4") or (name == "graph" and not found["captured"]):
            results[name] |= {"within": False, "why": "the run did not do what the path is named after"}
        print(json.dumps({name: {key: value for key, value in results[name].items() if key != "losses"}}), flush=True)
        if asked.out:
            facts = {"date": time.strftime("%Y-%m-%d %H:%M"), "how": __doc__, "steps": asked.steps}
            asked.out.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(row.get("within", True) for row in results.values()))


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder with another meshwright")
    parser.add_argument("--flash4", help="where FlashAttention-4's packages are")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="", help="paths whose name contains this")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every path")
    asked = parser.parse_args()
    if asked.before and not (asked.before / "meshwright" / "__init__.py").exists():
        parser.error(f"--before = {asked.before} has no meshwright in it: the code here would be compared with itself")
    if asked.small:
        asked.steps = 6
    if not paths(asked):
        parser.error("there is no path to compare: give --before or --flash4, or another --only")
    return asked


def paths(asked: argparse.Namespace) -> list[tuple[str, list[str], list[str]]]:
    """Names, fields of the job, and folders that Python imports from before all others."""
    found: list[tuple[str, list[str], list[str]]] = []
    if asked.before:
        found.append(("before", [], [str(asked.before.resolve())]))
    if not asked.small:
        found.append(("graph", ["run.cuda_graph=true"], []))
    if asked.flash4:
        found.append(("flash-4", [], [str(ROOT), asked.flash4]))
    if not asked.small:
        found += [(name, ["precision.compute=fp8", *fields], []) for name, fields in FP8.items()]
    return [path for path in found if asked.only in path[0]]


def trained(fields: list[str], asked: argparse.Namespace, packages: list[str] | None = None) -> Row:
    """One run's losses, and what it says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        job, run = Path(folder) / "job.toml", Path(folder) / "run"
        job.write_text(JOB, encoding="utf-8")
        given = [*(SMALL if asked.small else []), *fields, f"run.steps={asked.steps}", f"run.folder={run}"]
        words = [word for field in given for word in ("--set", field)]
        code = os.pathsep.join(filter(None, [*(packages or [str(ROOT)]), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-P", "-m", "meshwright", "train", str(job), "--quiet", *words]
        began = time.monotonic()
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": code}, cwd=folder)
        rows = [row for row in lines(run / "metrics.jsonl") if "step_s" in row]
        events = lines(run / "events.jsonl")
    attention = next((event["kernel"] for event in events if event["kind"] == "attention"), None)
    return {
        "losses": [row["loss"] for row in rows],
        "attention": attention,
        "captured": any(event.get("state") == "captured" for event in events if event["kind"] == "cuda_graph"),
        "wall_s": round(time.monotonic() - began, 1),
    }


def compared(plain: list[float], other: list[float], bound: float) -> Row:
    """How far the losses are from the plain ones."""
    apart = [b - a for a, b in zip(plain, other, strict=True)]
    return {
        "mean_apart": mean(apart),
        "last_apart": mean(apart[-LAST:]),
        "steps_apart": mean(map(abs, apart)),
        "most_apart": max(map(abs, apart)),
        "within": max(abs(mean(apart)), abs(mean(apart[-LAST:]))) <= bound,
    }


def lines(path: Path) -> list[Row]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
