"""What a GPU's own counters say during real runs, next to MFU: a busy GPU is not yet a well used one.

    python benchmarks/utilisation.py [--seconds 20] [--only NAME] [--out FILE]

Each setting is its own `meshwright train` process, ended without saving so many seconds after its second step. All
numbers are from the run folder's metrics.jsonl. Utilisation, power, memory and clock are what NVML or nvidia-smi told
the run (rank 0 asks every 5 seconds; utilisation is the share of the last moments in which any kernel ran); readings
made before the steps were steady are left out. MFU (6·P_matmul + 12·L·S·A FLOPs a token against the card's dense peak)
and tokens/s are medians over the same steps.
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

SMALL = """
[model]
vocab_size = 1024
width = 256
layers = 4
heads = 4
ffn_width = 768

[data]
sources = ["builtin:synthetic"]

[batch]
sequence_length = 128
global_batch = 1
micro_batch = 1

[precision]
compute = "bf16"

[evaluation]
every_steps = 0
"""
ONE = ["batch.global_batch=1", "batch.micro_batch=1", "run.compile=false"]
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "4M parameters, 1 × 128 tokens, eager": ("small", []),
    "1B, 1 × 256 tokens, eager": ("pretrain-1b", [*ONE, "batch.sequence_length=256"]),
    "1B, 8 × 4096 tokens, compiled": ("pretrain-1b", []),
}
READINGS = ("gpu_utilisation", "gpu_power_w", "gpu_memory_bytes", "gpu_clock_mhz")
SETTLED_S = 6.0
"""By then a reading that was made before the second step has been replaced."""
START_LIMIT_S = 150.0


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The complete rows so far."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def measure(job: str, overrides: list[str], seconds: float, folder: Path) -> dict[str, Any]:
    """Train for so many seconds after the second step, then read what the run recorded."""
    run = folder / "run"
    command = [sys.executable, "-m", "meshwright", "train", job, "--quiet"]
    for override in [*overrides, "run.steps=1000000", f"run.folder={run}"]:
        command += ["--set", override]
    began = time.monotonic()
    process = subprocess.Popen(command)
    try:
        while len(rows_of(run)) < 2:
            if process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                return {"failed": f"no second step after {time.monotonic() - began:.0f} s, exit {process.poll()}"}
            time.sleep(0.1)
        started_s = time.monotonic() - began
        time.sleep(SETTLED_S)
        settled = len(rows_of(run))
        time.sleep(max(0.0, seconds - SETTLED_S))
    finally:
        process.kill()  # a normal end would save 15 GB
        process.wait()
    return {"start_s": round(started_s, 1), **summary(rows_of(run)[settled:])}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the steps, and every distinct reading of the counters."""
    readings: list[dict[str, float]] = []
    for row in rows:
        reading = {name: row[name] for name in READINGS if name in row}
        if reading and (not readings or reading != readings[-1]):
            readings.append(reading)

    def median(name: str) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return statistics.median(values) if values else None

    return {
        "steps": len(rows),
        "step_s": median("step_s"),
        "tokens_per_s": median("tokens_per_s"),
        "mfu": median("mfu"),
        "memory_bytes": median("memory_bytes"),
        "readings": readings,
        **{name: _median_of(readings, name) for name in READINGS},
    }


def _median_of(readings: list[dict[str, float]], name: str) -> float | None:
    values = [reading[name] for reading in readings if name in reading]
    return statistics.median(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", help="run settings whose name contains this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(__doc__)
    results = []
    for name, (job, overrides) in SETTINGS.items():
        if arguments.only and arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "small.toml").write_text(SMALL)
            job = str(Path(folder) / "small.toml") if job == "small" else job
            results.append({"setting": name, **measure(job, overrides, arguments.seconds, Path(folder))})
        print(json.dumps(results[-1], ensure_ascii=False), flush=True)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    facts = {"date": time.strftime("%Y-%m-%d"), "device": device, "torch": torch.__version__, "how": __doc__}
    out = arguments.out or Path(__file__).parent / "results" / f"{facts['date']}-utilisation-h200.json"
    out.write_text(json.dumps({**facts, "results": results}, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
