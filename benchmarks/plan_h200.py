"""The planner against one H200: predictions are recorded first, then the same jobs are measured.

    python benchmarks/plan_h200.py predict            # before the runs: benchmarks/evidence/plan_h200_predicted.json
    python benchmarks/plan_h200.py measure [--only WORD] [--out FILE]
    python benchmarks/plan_h200.py compare [FILE]
    python benchmarks/plan_h200.py predict|measure|compare --jobs benchmarks/evidence/plan_h200_new.toml

`measure` runs every job as its own `meshwright bench` process over synthetic tokens, writes each result to --out as
soon as it is known, and continues from what is there; a job that runs out of memory is recorded as such. Time is the
median step; peak memory is max_memory_allocated, beside it what the allocator reserved and what the device has in use.
`compare` compares the committed predictions with the results. With --jobs the jobs are a file's, their predictions in
*_predicted.json next to it and their results in results/*_measured.jsonl.

A host that launches kernels faster or more slowly than the one beside the profile's GPU changes steps that wait for it.
`measure` therefore measures a bare launch too, and `predict` records every step for several launch times: the second
error of a step is that of the prediction for the launch time of the machine it ran on.

The jobs of this file: from 0.1B to 8B parameters, sequences of 1k to 16k
tokens, micro-batches of 1 to 16, three kinds of recomputation, bf16 and fp8, compiled and eager.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PREDICTED = HERE / "evidence" / "plan_h200_predicted.json"
MEASURED = HERE / "results" / "plan_h200_measured.jsonl"
LAUNCHES_US = (4.0, 6.0, 8.0, 10.0, 12.0, 16.0)
GIB = 2**30


@dataclass(frozen=True)
class Timed:
    """A job as overrides of pretrain-1b, and how many steps of it are run."""

    overrides: list[str]
    steps: int = 6
    warmup: int = 3


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


def jobs_of(path: Path | None) -> dict[str, Timed]:
    """The jobs of a file, or those above."""
    if path is None:
        return {name: Timed(overrides) for name, overrides in JOBS.items()}
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: Timed(one.pop("set"), **one) for name, one in table.items()}


def predict_all(jobs: dict[str, Timed], path: Path) -> None:
    """Every job's prediction, with the profile that is used."""
    from meshwright.hardware import find_profile

    profile, rows = find_profile("h200"), {}
    assert profile is not None
    for name, timed in jobs.items():
        prediction = _predicted(timed)
        memory = prediction.memory[0]
        rows[name] = {
            "step_s": prediction.step_s,
            "allocated_bytes": memory.allocated,
            "reserved_bytes": memory.reserved,
            "device_bytes": memory.device,
            "phases_s": {phase: seconds for phase, seconds in prediction.phases.items() if seconds},
            "terms_bytes": memory.terms,
            "guessed": list(prediction.guessed),
            "not_modelled": list(prediction.not_modelled),
        }
        print(f"{name:32} {1e3 * prediction.step_s:9.1f} ms {memory.allocated / GIB:8.2f} GiB")
    for launch_us in LAUNCHES_US:
        for name, seconds in _with_launches_of(profile.profile, launch_us * 1e-6, jobs).items():
            rows[name].setdefault("step_s_by_launch_us", {})[str(launch_us)] = seconds
    document = {
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
        "profile": profile.words,
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} predictions in {path}")


def _predicted(timed: Timed) -> Any:
    from meshwright.job import load_job
    from meshwright.job.devices import Cluster
    from meshwright.plan import predict

    return predict(load_job("pretrain-1b", timed.overrides).job, Cluster(gpu="h200"))


def _with_launches_of(profile: Any, launch_s: float, jobs: dict[str, Timed]) -> dict[str, float]:
    from meshwright.hardware import profiles_from, write_profile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "h200.json"
        write_profile(profile.model_copy(update={"launch_s": launch_s}), path)
        with profiles_from(path):
            return {name: _predicted(timed).step_s for name, timed in jobs.items()}


def _commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE)
    return said.stdout.strip()


def measure_all(jobs: dict[str, Timed], path: Path, only: str, limit_s: float) -> None:
    """What is not in the file yet."""
    done = {row["name"] for row in _lines(path)}
    began, launch_s = time.monotonic(), _launch_s()
    for name, timed in jobs.items():
        if name in done or only not in name:
            continue
        if time.monotonic() - began > limit_s:
            print(f"stopped after {limit_s:.0f} s; run again to continue")
            return
        row = {"name": name, **_measure(timed), "launch_s": launch_s}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = f"{1e3 * row['step_s']:.1f} ms, {row['peak_bytes'] / GIB:.2f} GiB" if "step_s" in row else row["state"]
        print(f"{name:32} {shown}  ({row['process_s']} s)", flush=True)


_LAUNCHES = """
import statistics, time, torch
small, taken = torch.zeros(16, device="cuda"), []
for _ in range(15):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(500):
        small.add_(1.0)
    taken.append((time.perf_counter() - began) / 500)
print(statistics.median(taken))
"""


def _launch_s() -> float | None:
    """Host time of a bare launch, as calibrate measures it, in its own process: a job must find the device empty."""
    done = subprocess.run([sys.executable, "-c", _LAUNCHES], capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def _measure(timed: Timed) -> dict[str, Any]:
    words = [word for override in timed.overrides for word in ("--set", override)]
    counts = ("--steps", str(timed.steps), "--warmup", str(timed.warmup))
    command = [sys.executable, "-m", "meshwright", "bench", "pretrain-1b", *words, *counts, "--json"]
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


def compare(predicted_at: Path, path: Path) -> None:
    """The table of errors, and their means."""
    document = json.loads(predicted_at.read_text(encoding="utf-8"))
    predicted, when = document["rows"], f"{document['written']}, at {document.get('commit', 'an unknown commit')}"
    print(f"predicted on {when}, with the profile: {document['profile']}")
    names = ("allocated_bytes", "reserved_bytes", "device_bytes")
    errors: dict[str, list[float]] = {"step": [], "step, this host": [], **{name: [] for name in names}}
    heads = f"{'step ms':>9} {'error':>7} {'host':>7} {'peak GiB':>9} {'error':>7} {'reserved':>9} {'device':>7}"
    print(f"{'job':32} {heads}")
    for row in _lines(path):
        guess = predicted.get(row["name"])
        if row["state"] != "measured" or guess is None:
            print(f"{row['name']:32} {row['state']}")
            continue
        off = {"step": guess["step_s"] / row["step_s"] - 1}
        if row.get("launch_s") and "step_s_by_launch_us" in guess:
            off["step, this host"] = _at(guess["step_s_by_launch_us"], 1e6 * row["launch_s"]) / row["step_s"] - 1
        for name, measured in zip(names, ("peak_bytes", "reserved_bytes", "device_bytes"), strict=True):
            if row[measured]:
                off[name] = guess[name] / row[measured] - 1
        for name, error in off.items():
            errors[name].append(error)
        cells = {name: f"{off[name]:+7.1%}" if name in off else f"{'–':>7}" for name in errors}
        step = f"{1e3 * row['step_s']:9.1f} {cells['step']} {cells['step, this host']}"
        peak = f"{row['peak_bytes'] / GIB:9.2f} {off['allocated_bytes']:+7.2%}"
        print(f"{row['name']:32} {step} {peak}  {cells['reserved_bytes']} {cells['device_bytes']}")
    for name, values in errors.items():
        if values:
            sizes = [abs(value) for value in values]
            mean, bias = statistics.mean(sizes), statistics.mean(values)
            print(f"{name:16} mean {mean:.2%}  largest {max(sizes):.2%}  bias {bias:+.2%}  of {len(values)}")
    if launches := sorted({row["launch_s"] for row in _lines(path) if row.get("launch_s")}):
        print("a bare launch took " + ", ".join(f"{1e6 * one:.2f} µs" for one in launches))


def _at(known: dict[str, float], launch_us: float) -> float:
    """A step between those of two launch times."""
    points = sorted((float(key), seconds) for key, seconds in known.items())
    for (low, first), (high, second) in pairwise(points):
        if launch_us <= high or high == points[-1][0]:
            return first + (second - first) * (launch_us - low) / (high - low)
    raise ValueError("a step is predicted for two launch times at least")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "compare"))
    parser.add_argument("file", nargs="?", type=Path, help="compare: the results")
    parser.add_argument("--jobs", type=Path, help="the jobs of this TOML file instead of those above")
    parser.add_argument("--out", type=Path, help="measure: where results go; else where compare looks for them")
    parser.add_argument("--only", default="", help="measure: jobs whose name contains this")
    parser.add_argument("--limit-s", type=float, default=540.0, help="measure: start no job after this time")
    arguments = parser.parse_args()
    jobs, predicted, measured = jobs_of(arguments.jobs), PREDICTED, MEASURED
    if arguments.jobs is not None:
        predicted = arguments.jobs.with_name(f"{arguments.jobs.stem}_predicted.json")
        measured = HERE / "results" / f"{arguments.jobs.stem}_measured.jsonl"
    if arguments.what == "predict":
        predict_all(jobs, predicted)
        return
    path = arguments.out or arguments.file or measured
    if arguments.what == "measure":
        measure_all(jobs, path, arguments.only, arguments.limit_s)
    compare(predicted, path)


if __name__ == "__main__":
    main()
