"""How far a plan for a CPU is from the run: `calibrate`, then `bench` of small jobs, whose prediction uses the profile.

    python benchmarks/cpu_calibrate.py [--rounds 3] [--ranks 1,2] [--only TEXT] [--out FILE]

A round calibrates this CPU into an empty folder (once with all cores in one rank, once with two ranks that have half of
them each) and benches every job right after, so that both see the same machine. A job's figure is predicted over
measured seconds of a step (the median of its steps, of three seconds at least), and its result the median over the
rounds. Everything is run as a user would: `meshwright calibrate [--nproc 2]`, `meshwright bench JOB [--nproc 2]`,
threads as those commands choose them. Jobs read synthetic tokens. The load of the machine before each round is in the
result: figures of a machine that does other work at the same time mean little.

With --cpu-time both commands run in one thread and read the CPU time of that thread instead of the clock, which other
work on the machine disturbs less: for one rank only, since it counts no waiting.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LLAMA_30M = [
    "model.vocab_size=8192", "model.width=512", "model.layers=8", "model.heads=8", "model.kv_heads=4",
    "model.ffn_width=1408", "model.max_sequence_length=512",
]  # fmt: skip
GPT2_10M = [
    "model.vocab_size=8192", "model.width=256", "model.layers=10", "model.heads=8", "model.kv_heads=8",
    "model.ffn_width=1024", "model.max_sequence_length=512", "model.norm=layernorm", "model.activation=gelu",
    "model.positions=learned", "model.qkv_bias=true", "model.linear_bias=true", "model.tied=true",
]  # fmt: skip
DEMO = [
    "model.vocab_size=1024", "model.width=128", "model.layers=4", "model.heads=4", "model.kv_heads=2",
    "model.ffn_width=384", "model.max_sequence_length=512",
]  # fmt: skip


def batch(sequence: int, whole: int, micro: int) -> list[str]:
    """Overrides of a batch."""
    return [f"batch.sequence_length={sequence}", f"batch.global_batch={whole}", f"batch.micro_batch={micro}"]


SECONDS = 3.0
"""Measured of every job at least: a few steps of a small one can all be in one slow spell."""
JOBS: list[tuple[str, int, list[str]]] = [
    ("tiny-llama, 8 × 128 tokens", 1, ["model.preset=tiny-llama", *batch(128, 8, 8)]),
    ("tiny-llama, 64 × 128 tokens", 1, ["model.preset=tiny-llama", *batch(128, 64, 64)]),
    ("tiny-gpt2, 8 × 128 tokens", 1, ["model.preset=tiny-gpt2", *batch(128, 8, 8)]),
    ("demo (Llama, 1M), 2 micro-batches of 8 × 128", 1, [*DEMO, *batch(128, 16, 8)]),
    ("demo, recompute full", 1, [*DEMO, *batch(128, 16, 8), "memory.recompute=full"]),
    ("demo, recompute selective", 1, [*DEMO, *batch(128, 16, 8), "memory.recompute=selective"]),
    ("demo, documents masked", 1, [*DEMO, *batch(128, 16, 8), "data.mask_documents=true"]),
    ("demo, fp16", 1, [*DEMO, *batch(128, 16, 8), "precision.compute=fp16"]),
    ("tiny-llama, bf16", 1, ["model.preset=tiny-llama", *batch(128, 8, 8), "precision.compute=bf16"]),
    ("GPT-2 of 10M, 4 × 256 tokens", 1, [*GPT2_10M, *batch(256, 4, 4)]),
    ("GPT-2 of 10M, 16 × 256 tokens", 1, [*GPT2_10M, *batch(256, 16, 16)]),
    ("GPT-2 of 10M, recompute full", 1, [*GPT2_10M, *batch(256, 16, 16), "memory.recompute=full"]),
    ("GPT-2 of 10M, dropout 0.1", 1, [*GPT2_10M, *batch(256, 4, 4), "model.dropout=0.1"]),
    ("Llama of 30M, 4 × 256 tokens", 1, [*LLAMA_30M, *batch(256, 4, 4)]),
    ("Llama of 30M, 4 micro-batches of 1 × 512", 1, [*LLAMA_30M, *batch(512, 4, 1)]),
    ("GPT-2 (124M), 2 × 256 tokens", 1, ["model.preset=gpt2", *batch(256, 2, 2)]),
    ("demo, 2 ranks, zero 0", 2, [*DEMO, *batch(128, 16, 8), "layout.dp_replicate=2"]),
    ("demo, 2 ranks, zero 1", 2, [*DEMO, *batch(128, 16, 8), "layout.dp_shard=2", "layout.zero=1"]),
    ("demo, 2 ranks, zero 3", 2, [*DEMO, *batch(128, 16, 8), "layout.dp_shard=2", "layout.zero=3"]),
    ("GPT-2 of 10M, 2 ranks, zero 0", 2, [*GPT2_10M, *batch(256, 8, 4), "layout.dp_replicate=2"]),
    ("GPT-2 of 10M, 2 ranks, zero 2", 2, [*GPT2_10M, *batch(256, 8, 4), "layout.dp_shard=2", "layout.zero=2"]),
    ("GPT-2 of 10M, 2 ranks, zero 3", 2, [*GPT2_10M, *batch(256, 8, 4), "layout.dp_shard=2", "layout.zero=3"]),
    (
        "Llama of 30M, 2 ranks, zero 3, recompute full",
        2,
        [*LLAMA_30M, *batch(256, 4, 2), "layout.dp_shard=2", "layout.zero=3", "memory.recompute=full"],
    ),
]


ON_CPU_TIME = """
import runpy, sys, time
time.perf_counter = time.thread_time
runpy.run_module("meshwright", run_name="__main__", alter_sys=True)
"""


def meshwright(*words: str, profiles: Path, cpu_time: bool) -> dict[str, Any]:
    """A command's JSON; ranks share the cores as the command decides."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"MESHWRIGHT_PROFILES": str(profiles), "PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1"} if cpu_time else {}
    command = [sys.executable, *(("-c", ON_CPU_TIME) if cpu_time else ("-m", "meshwright")), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def nproc(ranks: int) -> list[str]:
    """The option for some ranks."""
    return ["--nproc", str(ranks)] if ranks > 1 else []


def one_job(name: str, ranks: int, overrides: list[str], steps: int, profiles: Path, cpu_time: bool) -> dict[str, Any]:
    """A job's prediction and measurement."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text('[data]\nsources = ["builtin:synthetic"]\n[run]\ndevice = "cpu"\n', encoding="utf-8")
        given = [word for override in overrides for word in ("--set", override)]
        words = ["bench", str(job), *given, *nproc(ranks), "--steps"]
        found = meshwright(*words, str(steps), profiles=profiles, cpu_time=cpu_time)
        enough = math.ceil(SECONDS / found["step_s"]["median"])
        if enough > steps:
            found = meshwright(*words, str(enough), profiles=profiles, cpu_time=cpu_time)
    terms = {term["name"]: term for term in found["predicted"]}
    return {
        "job": name,
        "ranks": ranks,
        "parameters": found["parameters"],
        "predicted_s": terms["step"]["predicted"],
        "measured_s": terms["step"]["measured"],
        "ratio": terms["step"]["predicted"] / terms["step"]["measured"],
        "parts": {name: [terms[name]["predicted"], terms[name]["measured"]] for name in terms if name != "throughput"},
        "phases_s": found["phases_s"],
        "spread_s": [found["step_s"]["low"], found["step_s"]["high"]],
        "load": os.getloadavg()[0],
    }


def median_rows(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every job's median over the rounds."""
    found = []
    for rows in zip(*rounds, strict=True):
        ratios = sorted(row["ratio"] for row in rows)
        found.append(
            {
                "job": rows[0]["job"],
                "ranks": rows[0]["ranks"],
                "parameters": rows[0]["parameters"],
                "predicted_ms": round(1e3 * statistics.median(row["predicted_s"] for row in rows), 2),
                "measured_ms": round(1e3 * statistics.median(row["measured_s"] for row in rows), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }
        )
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true", help="calibrate --quick")
    parser.add_argument(
        "--keep", type=Path, help="use this folder of profiles and keep it; calibrates only what it lacks"
    )
    parser.add_argument("--cpu-time", action="store_true", help="one thread, by its CPU time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts = [1] if options.cpu_time else [int(word) for word in options.ranks.split(",")]
    jobs = [job for job in JOBS if job[1] in counts and any(word in job[0] for word in options.only.split("|"))]
    rounds, loads, took = [], [], []
    for number in range(options.rounds):
        loads.append(os.getloadavg())
        with tempfile.TemporaryDirectory() as folder:
            profiles = options.keep or Path(folder)
            rows = []
            for ranks in counts:
                file = profiles / ("cpu.json" if ranks == 1 else f"cpu-{ranks}-ranks.json")
                if not file.exists():
                    quick = ["--quick"] if options.quick else []
                    words = ["calibrate", "--device", "cpu", *quick, *nproc(ranks)]
                    made = meshwright(*words, profiles=profiles, cpu_time=options.cpu_time)
                    took.append(made["took_s"])
                for job in jobs:
                    if job[1] == ranks:
                        rows.append(one_job(*job, options.steps, profiles, options.cpu_time))
                        row = rows[-1]
                        both = f"{1e3 * row['predicted_s']:9.1f} ms predicted {1e3 * row['measured_s']:9.1f} measured"
                        print(f"{number + 1}  {row['job']:50} {both}  ×{row['ratio']:.2f}", flush=True)
            rounds.append(rows)
    report = {
        "date": date.today().isoformat(),
        "how": __doc__,
        "clock": "CPU time of one thread" if options.cpu_time else "wall",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "time": time.strftime("%H:%M"),
        "loads_before_rounds": loads,
        "calibrations_took_s": took,
        "rows": median_rows(rounds),
        "rounds": rounds,
    }
    worst = max(abs(row["ratio"] - 1) for row in report["rows"])
    for row in report["rows"]:
        print(
            f"{row['job']:50} {row['predicted_ms']:9.1f} {row['measured_ms']:9.1f} {row['ratio']:6.2f} {row['ratios']}"
        )
    print(f"farthest from 1: {worst:.0%}; load before the rounds: {[round(load[0], 2) for load in loads]}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
