"""Number formats on one GPU: how much faster fp8 and fp16 are than bf16, and whether their losses agree.

    python benchmarks/precision.py [--out FILE] [--only TEXT] [--speed-steps N] [--curve-steps N] [--list]

Each setting is a separate process that builds a job and runs the real training loop; nothing is saved.

speed   Llama-3.2-1B's shape, S 4096, micro-batch 8, compile per block, synthetic tokens. Throughput is the median over
        steps after the first two; every step ends with a device synchronisation. Memory is torch's peak allocation.
curve   12 layers × 768, S 1024, 16 sequences a step, a vocabulary of 8192, Python's standard library as text, the same
        batches in the same order for every format. The losses of the last 50 steps are compared with bf16's: the mean
        of the absolute differences, and the difference of the means.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_readings import gpu_readings

LAST = 50
BOUND = 0.02

SPEED: dict[str, Any] = {
    "model": {"preset": "llama-3.2-1b"},
    "data": {"sources": ["builtin:synthetic"]},
    "batch": {"sequence_length": 4096, "global_batch": 8, "micro_batch": 8},
}
CURVE: dict[str, Any] = {
    "model": {
        "vocab_size": 8192, "width": 768, "layers": 12, "heads": 12, "ffn_width": 2048, "max_sequence_length": 1024,
    },
    "data": {"sources": ["builtin:stdlib"]},
    "batch": {"sequence_length": 1024, "global_batch": 16, "micro_batch": 16},
    "optimizer": {"lr": 6e-4},
}  # fmt: skip
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "speed bf16": (SPEED, {"compute": "bf16"}),
    "speed fp8": (SPEED, {"compute": "fp8"}),
    "speed fp8, row": (SPEED, {"compute": "fp8", "fp8_scales": "row"}),
    "speed fp8, block": (SPEED, {"compute": "fp8", "fp8_scales": "block"}),
    "speed fp8, head": (SPEED, {"compute": "fp8", "fp8_head": True}),
    "speed fp16": (SPEED, {"compute": "fp16"}),
    "speed bf16, 16-bit gradients": (SPEED, {"compute": "bf16", "gradients": "bf16"}),
    "curve bf16": (CURVE, {"compute": "bf16"}),
    "curve fp8": (CURVE, {"compute": "fp8"}),
    "curve fp8, row": (CURVE, {"compute": "fp8", "fp8_scales": "row"}),
    "curve fp8, block": (CURVE, {"compute": "fp8", "fp8_scales": "block"}),
    "curve fp8, head": (CURVE, {"compute": "fp8", "fp8_head": True}),
    "curve fp16": (CURVE, {"compute": "fp16"}),
}


class Rows:
    """Recorder and progress that keep every step's row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def event(self, kind: str, **fields: Any) -> None:
        """The rows say it all."""

    def sample(self, step: int, text: str) -> None:
        """Nothing is sampled."""

    def step(self, row: dict[str, Any]) -> None:
        """No progress display."""

    def evaluation(self, step: int, val_loss: float) -> None:
        """Nothing is evaluated."""

    def message(self, text: str) -> None:
        print(text, file=sys.stderr)


def run(setting: dict[str, Any]) -> dict[str, Any]:
    """Train one job in this process."""
    import torch

    from meshwright.data import prepare
    from meshwright.job import Job, model_preset
    from meshwright.parallel import World, build
    from meshwright.train import Trainer, choose_device, device_name, prepare_device

    shape = setting["model"]
    if name := shape.get("preset"):
        setting = setting | {"model": model_preset(name) | shape}
    job = Job.model_validate(setting)
    device = choose_device(job)
    prepare_device(job, device)
    try:
        world, seen = World(device), Rows()
        engine, weights = build(job, world)
        Trainer(job, prepare(job.data, job.model.vocab_size), engine, weights, seen, seen, world).run()
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    timed = seen.rows[2:]
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "tokens_per_s": round(statistics.median(row["tokens_per_s"] for row in timed)),
        "step_s_min_median_max": [round(f(row["step_s"] for row in timed), 4) for f in (min, statistics.median, max)],
        "mfu": statistics.median(row["mfu"] for row in timed) if timed[0]["mfu"] is not None else None,
        "first_step_s": round(seen.rows[0]["step_s"], 1),
        "peak_gib": round(seen.rows[-1]["memory_bytes"] / 2**30, 2),
        "skipped_steps": seen.rows[-1].get("skipped_steps", 0),
        "losses": [row["loss"] for row in seen.rows],
    }


def measure(name: str, arguments: argparse.Namespace, cache: str) -> dict[str, Any]:
    shape, precision = SETTINGS[name]
    steps = arguments.speed_steps if shape is SPEED else arguments.curve_steps
    setting = shape | {
        "data": shape["data"] | {"cache": cache},
        "precision": precision,
        "evaluation": {"every_steps": 0},
        "run": {"steps": steps, "compile": True, "device": arguments.device},
    }
    if arguments.tiny:
        setting["model"] = shape["model"] | {"preset": None, "layers": 2, "width": 64, "heads": 4, "ffn_width": 128}
        setting["model"] |= {"vocab_size": 512}
        setting["batch"] = {"sequence_length": 32, "global_batch": 4, "micro_batch": 4}
        setting["run"]["compile"] = False
    started = time.monotonic()
    command = [sys.executable, __file__, "--child", json.dumps(setting)]
    with gpu_readings() as gpu:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout) if done.returncode == 0 else {"failed": f"exit code {done.returncode}"}
    return {"setting": name, **result, "gpu": gpu, "process_s": round(time.monotonic() - started, 1)}


def against_bf16(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every other format of a kind compared with bf16: throughput, and for curves the last losses."""
    by_name = {result["setting"]: result for result in results if "failed" not in result}
    rows = []
    for name, result in by_name.items():
        kind, _, form = name.partition(" ")
        base = by_name.get(f"{kind} bf16")
        if base is None or form == "bf16":
            continue
        row = {"setting": name, "tokens_per_s_ratio": round(result["tokens_per_s"] / base["tokens_per_s"], 3)}
        if kind == "curve":
            pairs = list(zip(result["losses"][-LAST:], base["losses"][-LAST:], strict=True))
            row["mean_absolute_difference"] = statistics.mean(abs(ours - theirs) for ours, theirs in pairs)
            row["difference_of_means"] = statistics.mean(ours - theirs for ours, theirs in pairs)
            row["stays_together"] = row["mean_absolute_difference"] < BOUND
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="run settings whose name contains this")
    parser.add_argument("--speed-steps", type=int, default=12)
    parser.add_argument("--curve-steps", type=int, default=350)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU: to see the script run, not to measure")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(run(json.loads(arguments.child))))
        return
    names = [name for name in SETTINGS if not arguments.only or arguments.only in name]
    if arguments.list:
        print("\n".join(names))
        return
    print(__doc__)
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for name in names:
            results.append(measure(name, arguments, cache))
            brief = {key: value for key, value in results[-1].items() if key != "losses"}
            brief["first_and_last_loss"] = [*results[-1].get("losses", [])[:1], *results[-1].get("losses", [])[-1:]]
            print(json.dumps(brief), flush=True)
    compared = against_bf16(results)
    for row in compared:
        print(json.dumps(row))
    if arguments.out:
        facts = {"date": time.strftime("%Y-%m-%d"), "results": results, "against_bf16": compared}
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
