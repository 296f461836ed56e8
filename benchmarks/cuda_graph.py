"""CUDA graphs for host-bound jobs: steps with and without `run.cuda_graph`, and their losses on real text.

    python benchmarks/cuda_graph.py [--steps N] [--only TEXT] [--text FOLDER] [--out FILE]

gpt2 (124M) 16 × 1024 and Llama-3.2-1B at micro-batch 1, S 4096, bf16, compiled, each a `meshwright train` over the same
batches, in turn. Printed: tokens/s (median after 20 steps), the difference of the losses, and what the run says
of its graph. --text is a folder of `meshwright data prepare`; without it Python's library is prepared in the cache.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from gpu_readings import gpu_readings, said

JOBS = {
    "gpt2 16 × 1024": [
        "model.preset=gpt2",
        "batch.sequence_length=1024",
        "batch.global_batch=16",
        "batch.micro_batch=16",
    ],
    "1b micro-batch 1": [
        *("model.preset=llama-3.2-1b", "batch.sequence_length=4096", "batch.global_batch=1", "batch.micro_batch=1"),
    ],
}
SETTLED = 20


def main() -> None:
    """Train each job both ways, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not any(asked.only in name for name in JOBS):
        parser.error(f"--only = {asked.only} is part of none of {', '.join(JOBS)}")
    results: dict[str, Any] = {}
    for name, fields in ((name, fields) for name, fields in JOBS.items() if asked.only in name):
        without, graphed = (train(fields, asked, on) for on in ("false", "true"))
        apart = [abs(a - b) for a, b in zip(without["losses"], graphed["losses"], strict=True)]
        ratio = graphed["tokens_per_s"] / without["tokens_per_s"]
        results[name] = {"without": without, "with": graphed, "ratio": ratio, "loss_apart_mean": mean(apart)}
        print(
            f"{name}: {without['tokens_per_s']:,.0f} → {graphed['tokens_per_s']:,.0f} tokens/s ({ratio:.3f} ×); losses "
            f"{mean(apart):.5f} apart in the mean, {max(apart):.5f} at most{said(graphed['gpu'])}; {graphed['graph']}",
            flush=True,
        )
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def train(fields: list[str], asked: argparse.Namespace, graph: str) -> dict[str, Any]:
    """One run: its speed, losses, and the events of its graph."""
    source = json.dumps([str(asked.text.resolve()) if asked.text else "builtin:stdlib"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text("")
        run = Path(folder) / "run"
        more = ["precision.compute=bf16", "run.compile=true", f"run.steps={asked.steps}", f"run.cuda_graph={graph}"]
        more += [f"data.sources={source}", "evaluation.every_steps=0", "checkpoint.every_steps=0", f"run.folder={run}"]
        words = [word for field in (*fields, *more) for word in ("--set", field)]
        command = [sys.executable, "-m", "meshwright", "train", str(Path(folder) / "job.toml"), "--quiet", *words]
        with gpu_readings() as gpu:
            subprocess.run(command, check=True)
        rows = [row for row in lines(run / "metrics.jsonl") if "step_s" in row]
        events = [event for event in lines(run / "events.jsonl") if "cuda_graph" in event.values()]
    return {
        "tokens_per_s": median(row["tokens_per_s"] for row in rows[SETTLED:]),
        "losses": [row["loss"] for row in rows],
        "memory_bytes": rows[-1]["memory_bytes"],
        "gpu": gpu,
        "graph": [{key: event[key] for key in ("state", "reason")} for event in events],
    }


def lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
