"""The planner against one H200: predictions are recorded first, then the same jobs are measured.

    python benchmarks/plan_h200.py predict            # before the runs: benchmarks/evidence/plan_h200_predicted.json
    python benchmarks/plan_h200.py measure [--only WORD] [--out FILE]
    python benchmarks/plan_h200.py compare [FILE]

`measure` runs every job as its own `meshwright bench` process over synthetic tokens, writes each result to --out as
soon as it is known, and continues from what is there; a job that runs out of memory is recorded as such. Time is the
median step; peak memory is max_memory_allocated, beside it what the allocator reserved and what the device has in use.
`compare` compares the committed predictions with the results. From 0.1B to 8B parameters, sequences of 1k to 16k
tokens, micro-batches of 1 to 16, three kinds of recomputation, bf16 and fp8, compiled and eager.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PREDICTED = HERE / "evidence" / "plan_h200_predicted.json"
MEASURED = HERE / "results" / "plan_h200_measured.jsonl"
COUNTS = ("--steps", "6", "--warmup", "3")
GIB = 2**30


def job(model: str, sequence: int, micro: int, recompute: str = "none", *words: str, times: int = 1) -> list[str]:
    """A job as overrides of pretrain-1b; `words` are fp8, eager and gradients16."""
    given = [f'model.preset="{model}"', f"batch.sequence_length={sequence}", f"batch.micro_batch={micro}"]
    given += [f"batch.global_batch={micro * times}", f'memory.recompute="{recompute}"']
    given += ['precision.compute="fp8"'] if "fp8" in words else []
    given += ['precision.gradients="bf16"'] if "gradients16" in words else []
    return given + (["run.compile=false"] if "eager" in words else [])


JOBS = {
    "gpt2 s1k b16": job("gpt2", 1024, 16),
    "gpt2 s1k b4 eager": job("gpt2", 1024, 4, "none", "eager"),
    "gpt2-medium s1k b8 full eager": job("gpt2-medium", 1024, 8, "full", "eager"),
    "gpt2-xl s1k b8 selective": job("gpt2-xl", 1024, 8, "selective"),
    "0.6b s2k b8": job("qwen3-0.6b", 2048, 8),
    "0.6b s8k b1 eager x2": job("qwen3-0.6b", 8192, 1, "none", "eager", times=2),
    "0.6b s16k b1 full": job("qwen3-0.6b", 16384, 1, "full"),
    "1b s1k b16": job("llama-3.2-1b", 1024, 16),
    "1b s2k b4 eager": job("llama-3.2-1b", 2048, 4, "none", "eager"),
    "1b s4k b1 eager x4": job("llama-3.2-1b", 4096, 1, "none", "eager", times=4),
    "1b s4k b2 selective": job("llama-3.2-1b", 4096, 2, "selective"),
    "1b s4k b16 full": job("llama-3.2-1b", 4096, 16, "full"),
    "1b s8k b2 selective eager": job("llama-3.2-1b", 8192, 2, "selective", "eager"),
    "1b s16k b1": job("llama-3.2-1b", 16384, 1),
    "1b s16k b2 full eager": job("llama-3.2-1b", 16384, 2, "full", "eager"),
    "1b s4k b8 fp8": job("llama-3.2-1b", 4096, 8, "none", "fp8"),
    "1b s2k b16 full fp8": job("llama-3.2-1b", 2048, 16, "full", "fp8"),
    "1.7b s4k b2 selective eager": job("qwen3-1.7b", 4096, 2, "selective", "eager"),
    "3b s4k b2": job("llama-3.2-3b", 4096, 2),
    "3b s8k b1 full eager": job("llama-3.2-3b", 8192, 1, "full", "eager"),
    "3b s4k b4 selective fp8": job("llama-3.2-3b", 4096, 4, "selective", "fp8"),
    "4b s2k b4 selective eager": job("qwen3-4b", 2048, 4, "selective", "eager"),
    "7b s4k b1 full eager": job("llama-2-7b", 4096, 1, "full", "eager", "gradients16"),
    "8b s4k b1 full": job("llama-3-8b", 4096, 1, "full", "gradients16"),
}


def predict_all(path: Path) -> None:
    """Every job's prediction, with the profile that is used."""
    from meshwright.hardware import profile_of
    from meshwright.job import load_job
    from meshwright.job.devices import Cluster
    from meshwright.plan import predict

    profile, rows = profile_of("h200"), {}
    for name, overrides in JOBS.items():
        prediction = predict(load_job("pretrain-1b", overrides).job, Cluster(gpu="h200"))
        memory = prediction.memory[0]
        rows[name] = {
            "step_s": prediction.step_s,
            "allocated_bytes": memory.allocated,
            "reserved_bytes": memory.reserved,
            "device_bytes": memory.device,
            "phases_s": {phase: seconds for phase, seconds in prediction.phases.items() if seconds},
            "terms_bytes": memory.terms,
            "guessed": list(prediction.guessed),
        }
        print(f"{name:32} {1e3 * prediction.step_s:9.1f} ms {memory.allocated / GIB:8.2f} GiB")
    about = None if profile is None else {"date": profile.date, "torch": profile.torch, "device": profile.device}
    document = {"written": time.strftime("%Y-%m-%d"), "profile": about, "rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} predictions in {path}")


def measure_all(path: Path, only: str, limit_s: float) -> None:
    """What is not in the file yet."""
    done = {row["name"] for row in _lines(path)}
    began = time.monotonic()
    for name, overrides in JOBS.items():
        if name in done or only not in name:
            continue
        if time.monotonic() - began > limit_s:
            print(f"stopped after {limit_s:.0f} s; run again to continue")
            return
        row = {"name": name, **_measure(overrides)}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        told = f"{1e3 * row['step_s']:.1f} ms, {row['peak_bytes'] / GIB:.2f} GiB" if "step_s" in row else row["state"]
        print(f"{name:32} {told}  ({row['process_s']} s)", flush=True)


def _measure(overrides: list[str]) -> dict[str, Any]:
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "meshwright", "bench", "pretrain-1b", *words, *COUNTS, "--json"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    took = {"process_s": round(time.monotonic() - began, 1)}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"state": "out of memory" if "ran out of memory" in done.stderr else f"failed: {last}", **took}
    result = json.loads(done.stdout)
    return {
        "state": "measured",
        "device": result["device"],
        "torch": result["torch"],
        "step_s": result["step_s"]["median"],
        "step_s_least": result["step_s"]["least"],
        "first_step_s": result["first_step_s"],
        "mfu": result["mfu"],
        "peak_bytes": result["peak_memory_bytes"],
        "reserved_bytes": result["reserved_memory_bytes"],
        "device_bytes": result.get("device_memory_bytes"),
        "steady_bytes": result["steady_memory_bytes"],
        "phases_s": result["phases_s"],
        "attention": result["attention"],
        **took,
    }


def compare(path: Path) -> None:
    """The table of errors, and their means."""
    predicted = json.loads(PREDICTED.read_text(encoding="utf-8"))["rows"]
    names = ("allocated_bytes", "reserved_bytes", "device_bytes")
    errors: dict[str, list[float]] = {"step": [], **{name: [] for name in names}}
    print(f"{'job':32} {'step ms':>9} {'error':>7} {'peak GiB':>9} {'error':>7} {'reserved':>9} {'device':>7}")
    for row in _lines(path):
        guess = predicted.get(row["name"])
        if row["state"] != "measured" or guess is None:
            print(f"{row['name']:32} {row['state']}")
            continue
        off = {"step": guess["step_s"] / row["step_s"] - 1}
        for name, measured in zip(names, ("peak_bytes", "reserved_bytes", "device_bytes"), strict=True):
            if row[measured]:
                off[name] = guess[name] / row[measured] - 1
        for name, error in off.items():
            errors[name].append(error)
        others = " ".join(f"{off[name]:+8.1%}" if name in off else f"{'–':>8}" for name in names[1:])
        step, peak = f"{1e3 * row['step_s']:9.1f} {off['step']:+7.1%}", f"{row['peak_bytes'] / GIB:9.2f}"
        print(f"{row['name']:32} {step} {peak} {off['allocated_bytes']:+7.1%} {others}")
    for name, values in errors.items():
        if values:
            sizes = [abs(value) for value in values]
            mean, bias = statistics.mean(sizes), statistics.mean(values)
            print(f"{name:16} mean {mean:.1%}  largest {max(sizes):.1%}  bias {bias:+.1%}  of {len(values)}")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "compare"))
    parser.add_argument("file", nargs="?", type=Path, default=MEASURED)
    parser.add_argument("--out", type=Path, help="measure: where results go; else where compare looks for them")
    parser.add_argument("--only", default="", help="measure: jobs whose name contains this")
    parser.add_argument("--limit-s", type=float, default=540.0, help="measure: start no job after this time")
    arguments = parser.parse_args()
    if arguments.what == "predict":
        predict_all(PREDICTED)
        return
    path = arguments.out or arguments.file
    if arguments.what == "measure":
        measure_all(path, arguments.only, arguments.limit_s)
    compare(path)


if __name__ == "__main__":
    main()
