"""Eager against compiled: the losses of the same steps, with fp32 as the measure of bf16's rounding.

    python benchmarks/compiled_curve.py [--steps N] [--layers N] [--out FILE]

Llama-3.2-1B's width with fewer layers on Python's standard library as text, each setting a separate
`meshwright train` over the same batches. Printed: the mean and the largest absolute difference of a step's loss from
bf16 eager's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

JOB = """
[model]
preset = "llama-3.2-1b"
layers = {layers}
vocab_size = 8192
[data]
sources = ["builtin:stdlib"]
[batch]
sequence_length = 1024
global_batch = 8
micro_batch = 8
[optimizer]
lr = 3e-4
[schedule]
warmup_steps = 10
[evaluation]
every_steps = 0
[run]
steps = {steps}
"""
SETTINGS = {
    "bf16 eager": ('precision.compute="bf16"', "run.compile=false"),
    "bf16 compiled": ('precision.compute="bf16"', "run.compile=true"),
    "fp32 eager": ('precision.compute="fp32"', "run.compile=false"),
    "fp8 compiled": ('precision.compute="fp8"', "run.compile=true"),
}


def main() -> None:
    """Train each setting, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(JOB.format(layers=asked.layers, steps=asked.steps), encoding="utf-8")
        losses = {name: train(job, sets) for name, sets in SETTINGS.items()}
    base = losses["bf16 eager"]
    rows = {}
    for name, values in losses.items():
        apart = [abs(a - b) for a, b in zip(values, base, strict=True)]
        rows[name] = {"first": values[0], "last": values[-1], "mean_difference": mean(apart), "most": max(apart)}
        ends = f"{values[0]:.4f} → {values[-1]:.4f}"
        print(f"{name:14} {ends}  from bf16 eager: mean {mean(apart):.5f}, most {max(apart):.5f}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps({"rows": rows, "losses": losses}, indent=1) + "\n", encoding="utf-8")


def train(job: Path, sets: tuple[str, ...]) -> list[float]:
    """The losses of one run."""
    words = [word for each in sets for word in ("--set", each)]
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "meshwright", "train", str(job), *words, "--set", f'run.folder="{runs}"']
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        [file] = Path(runs).rglob("metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


if __name__ == "__main__":
    main()
