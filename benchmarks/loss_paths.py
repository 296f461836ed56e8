"""Losses of every way to compute a step, over some hundred steps of the same real text, next to those of a plain one.

    python benchmarks/loss_paths.py [--before FOLDER] [--flash4 PATHS] [--only TEXT] [--together N] [--out FILE]
    python benchmarks/loss_paths.py --small          # on a CPU, a small model in fp32: shows that it runs

12 layers × 768, S 1024, 16 sequences a step, a vocabulary of 8192, Python's library as text, compiled blocks in bf16.
One model is trained for --start steps (200). Each path is a `meshwright train` of its own that starts from its weights
and sees the same batches: from random weights, the first hundred steps amplify whatever is rounded differently, and
two runs of one path can end 0.03 apart. Paths:

    repeat         the plain one again: how far apart two runs of the same path are
    before         another checkout's code (`git archive COMMIT meshwright | tar x -C FOLDER`)
    graph          run.cuda_graph = true
    flash-4        FlashAttention-4, whose packages are at --flash4 (as in PYTHONPATH); all others run without it
    fp8, …         precision.compute = fp8 by tensor, by row, by block, and with the head

A path that did not do what its name says (no graph captured, another attention kernel) counts as failed. --together
runs several paths at a time, which does not change what they compute but makes them slow.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LAST = 50
JOB = """
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
[run]
compile = true
"""
SMALL = [
    *("batch.sequence_length=32", "batch.global_batch=2", "batch.micro_batch=2", "precision.compute=fp32"),
    *("run.compile=false", 'run.device="cpu"', "data.workers=0"),
]
MODEL = {"vocab_size": 8192, "width": 768, "layers": 12, "heads": 12, "ffn_width": 2048, "max_sequence_length": 1024}
SMALL_MODEL = {"vocab_size": 512, "width": 32, "layers": 1, "heads": 2, "ffn_width": 64, "max_sequence_length": 32}
FP8 = {
    "fp8, tensor": [],
    "fp8, row": ["precision.fp8_scales=row"],
    "fp8, block": ["precision.fp8_scales=block"],
    "fp8, head": ["precision.fp8_head=true"],
}
Row = dict[str, Any]


def main() -> None:
    """Train the model that all start from, the plain path and each other one; compare, and write."""
    asked = parse()
    print(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        start = started(asked, Path(folder))
        with ThreadPoolExecutor(asked.together) as lanes:
            running = {name: lanes.submit(trained, given, asked, start, extra) for name, given, extra in paths(asked)}
            plain = running.pop("plain").result()
            if "losses" not in plain:
                sys.exit(f"the plain path failed: {plain['why']}")
            results: dict[str, Row] = {"plain": plain}
            for name, run in running.items():
                results[name] = judged(name, run.result(), plain)
                shown = {key: value for key, value in results[name].items() if key != "losses"}
                print(json.dumps({name: shown}), flush=True)
                if asked.out:
                    facts = {"date": time.strftime("%Y-%m-%d %H:%M"), "how": __doc__}
                    facts |= {"steps": asked.steps, "start": asked.start, "together": asked.together}
                    asked.out.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(row.get("within", True) for row in results.values()))


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder with another meshwright")
    parser.add_argument("--flash4", help="where FlashAttention-4's packages are")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--start", type=int, default=200, help="steps of the model that all start from")
    parser.add_argument("--only", default="", help="paths whose name contains this")
    parser.add_argument("--together", type=int, default=1, help="paths that run at a time")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every path")
    asked = parser.parse_args()
    if asked.before and not (asked.before / "meshwright" / "__main__.py").exists():
        parser.error(f"--before = {asked.before} has no meshwright in it: the code here would be compared with itself")
    if asked.small:
        asked.steps, asked.start = 6, 4
    if len(paths(asked)) < 2:
        parser.error(f"--only = {asked.only} is part of no path's name, or it needs --before or --flash4")
    return asked


def paths(asked: argparse.Namespace) -> list[tuple[str, list[str], list[str]]]:
    """Names, fields of the job, and folders that Python imports from before all others; the plain path first."""
    here = [str(ROOT)]
    found: list[tuple[str, list[str], list[str]]] = [("repeat", [], here)]
    if asked.before:
        found.append(("before", [], [str(asked.before.resolve())]))
    if not asked.small:
        found.append(("graph", ["run.cuda_graph=true"], here))
    if asked.flash4:
        found.append(("flash-4", [], [*here, asked.flash4]))
    if not asked.small:
        found += [(name, ["precision.compute=fp8", *fields], here) for name, fields in FP8.items()]
    return [("plain", [], here), *(path for path in found if asked.only in path[0])]


class Start(NamedTuple):
    """What all paths have in common."""

    text: Path
    weights: Path


def started(asked: argparse.Namespace, folder: Path) -> Start:
    """The text as tokens, and the weights of a model that was trained on it for some steps."""
    text, run, weights = folder / "text", folder / "start", folder / "weights"
    model = SMALL_MODEL if asked.small else MODEL
    code = [str((asked.before or ROOT).resolve())]  # older code does not read what newer code prepares
    meshwright(code, "data", "prepare", "builtin:stdlib", "--out", text, "--vocab-size", model["vocab_size"])
    fields = [f"model.{name}={value}" for name, value in model.items()]
    trained_run([*fields, "run.seed=1"], asked, text, run, asked.start, [str(ROOT)])
    meshwright([str(ROOT)], "checkpoint", "export", run, weights)
    return Start(text, weights)


def trained(fields: list[str], asked: argparse.Namespace, start: Start, packages: list[str]) -> Row:
    """One path's losses, and what its run says of itself."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        given = [*fields, f"model.init_from={start.weights}", "checkpoint.every_steps=0"]
        try:
            trained_run(given, asked, start.text, run, asked.steps, packages)
        except subprocess.CalledProcessError as failed:
            return {"within": False, "why": failed.stderr[-1500:]}
        rows = [row for row in lines(run / "metrics.jsonl") if "step_s" in row]
        events = lines(run / "events.jsonl")
    attention = next((event["kernel"] for event in events if event["kind"] == "attention"), None)
    return {
        "losses": [row["loss"] for row in rows],
        "attention": attention,
        "captured": any(event.get("state") == "captured" for event in events if event["kind"] == "cuda_graph"),
        "wall_s": round(time.monotonic() - began, 1),
    }


def trained_run(
    fields: list[str], asked: argparse.Namespace, text: Path, run: Path, steps: int, packages: list[str]
) -> None:
    """Train the job with these fields into a run folder, by the meshwright that `packages` has first."""
    job = run.with_suffix(".toml")
    job.write_text(JOB, encoding="utf-8")
    given = [*(SMALL if asked.small else []), f"run.steps={steps}", f"run.folder={run}"]
    given += [f"data.sources={json.dumps([str(text)])}", *fields]
    meshwright(packages, "train", job, "--quiet", *(word for field in given for word in ("--set", field)))


def meshwright(packages: list[str], *words: Any) -> None:
    """Run a command of meshwright, which is the one that `packages` has first."""
    code = os.pathsep.join(filter(None, [*packages, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "meshwright", *map(str, words)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": code}, capture_output=True, text=True)


def judged(name: str, found: Row, plain: Row) -> Row:
    """A path's row next to the plain one's, and whether it is within its bound."""
    if "losses" not in found:
        return found
    found |= compared(plain["losses"], found["losses"], 0.02 if "fp8" in name else 0.01)
    if (name == "flash-4" and found["attention"] != "flash-4") or (name == "graph" and not found["captured"]):
        found |= {"within": False, "why": "the run did not do what the path is named after"}
    return found


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
