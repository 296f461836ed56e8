"""The demo's mixture of experts next to the dense demo, which has the size that a token of the mixture uses.

    python benchmarks/demo_experts.py [--seeds 0 1 2] [--steps 700] [--only NAME …] [--small] [--at-once 1]
                                      [--folder DIR] [--out FILE]

dense     the recipe demo: a feed-forward of width 384
experts   the recipe demo-moe: 8 experts of width 192, two for each token; the same data, tokens, steps, rate and seed
rate      the same balanced without a loss (balance_rate = 0.001 instead of balance_loss = 0.01)
left      the same without balancing

`--folder`: the runs stay there, and those that have ended there are only read.
`--small`: all of them with half the width, layers, heads and sequence, a tenth of the work.

Every run is `meshwright train` in its own process with one thread, `--at-once` of them together. Reported: the held-out
loss at the end and on the way, and for experts the load of the last step: entropy (1 if all experts of a layer get
equally many tokens), the most loaded expert over the mean, and how many got none. Losses depend on neither the number
of threads nor the machine beyond rounding; times here mean little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RUNS: dict[str, list[str]] = {
    "dense": ["demo"],
    "experts": ["demo-moe"],
    "rate": ["demo-moe", "model.experts.balance_loss=0.0", "model.experts.balance_rate=0.001"],
    "left": ["demo-moe", "model.experts.balance_loss=0.0"],
}
SMALL = ["model.width=64", "model.layers=2", "model.heads=2", "model.kv_heads=1", "batch.sequence_length=64"]
LOAD = ("expert_entropy", "expert_imbalance", "idle_experts")


def train(name: str, seed: int, steps: int, small: bool, folder: Path) -> dict[str, Any]:
    """Train one of the runs, unless that was done, and read its figures."""
    recipe, *changes = RUNS[name]
    if small:
        changes += [*SMALL, "model.ffn_width=192" if recipe == "demo" else "model.experts.ffn_width=96"]
    changes += [f"run.seed={seed}", f"run.steps={steps}", f"run.folder={folder}", "run.device=cpu"]
    words = [sys.executable, "-m", "meshwright", "train", recipe, *(f"--set={change}" for change in changes)]
    if not ended(folder, steps):
        subprocess.run(words, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    held_out = {str(row["step"]): round(row["val_loss"], 4) for row in rows if "val_loss" in row}
    found = {"run": name, "seed": seed, "val_loss": held_out[str(steps)], "held_out": held_out}
    last = [row for row in rows if "loss" in row][-1]
    found |= {key: round(last[key], 4) for key in LOAD if key in last}
    loads = [event["tokens"] for event in events if event["kind"] == "experts"]
    found |= {"parameters": events[0]["parameters"]} | ({"tokens": loads[-1]} if loads else {})
    print(f"{name:8} seed {seed}  {json.dumps({key: found[key] for key in found if key != 'tokens'})}", flush=True)
    return found


def ended(folder: Path, steps: int) -> bool:
    """Whether a run with as many steps has ended in a folder."""
    return folder.is_dir() and f'"step": {steps}, "val_loss"' in (folder / "metrics.jsonl").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.at_once) as pool:
        jobs = [
            pool.submit(
                train, name, seed, options.steps, options.small, (options.folder or Path(scratch)) / f"{name}-{seed}"
            )
            for seed in options.seeds
            for name in options.only
        ]
        results = [job.result() for job in jobs]
    means = {
        name: round(statistics.mean(one["val_loss"] for one in results if one["run"] == name), 4)
        for name in options.only
    }
    print(f"mean held-out loss after {options.steps} steps: {json.dumps(means)}")
    if options.out:
        found = {
            "steps": options.steps,
            "small": options.small,
            "seeds": options.seeds,
            "mean_val_loss": means,
            "results": results,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
