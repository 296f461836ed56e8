"""What one GPU reaches on the headline shape: Llama-3.2-1B, S 4096, bf16 compute, fp32 master, AdamW, clipping.

    python benchmarks/headline.py [--out FILE] [--steps N]

Each setting is its own `meshwright train pretrain-1b` process. Throughput is the median over steps after the first two;
every step ends with a device synchronisation, and its time includes the wait for data. MFU counts
6·P_matmul + 12·L·S·A FLOPs a token (full attention) against the card's dense peak. Memory is torch's peak allocation.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = {
    "eager, tied, micro-batch 4": ["run.compile=false", "batch.global_batch=4", "batch.micro_batch=4"],
    "compile, tied, micro-batch 4": ["batch.global_batch=4", "batch.micro_batch=4"],
    "compile, tied, micro-batch 8": [],
    "compile, untied, micro-batch 8": ["model.tied=false"],
    "compile, tied, micro-batch 8, accumulation 4": ["batch.global_batch=32"],
    "compile, documents masked, micro-batch 8": ["data.mask_documents=true"],
}


def measure(name: str, overrides: list[str], steps: int, folder: Path) -> dict:
    run = folder / name.replace(" ", "-").replace(",", "")
    command = [sys.executable, "-m", "meshwright", "train", "pretrain-1b", "--json"]
    for override in [*overrides, f"run.steps={steps}", f"run.folder={run}"]:
        command += ["--set", override]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"setting": name, "failed": done.returncode}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    start = json.loads((run / "events.jsonl").read_text().splitlines()[0])
    timed = rows[2:]
    return {
        "setting": name,
        "device": start["device"],
        "parameters": start["parameters"],
        "tokens_per_s": round(statistics.median(row["tokens_per_s"] for row in timed)),
        "step_s_min_median_max": [round(f(row["step_s"] for row in timed), 4) for f in (min, statistics.median, max)],
        "mfu": statistics.median(row["mfu"] for row in timed) if timed[0]["mfu"] is not None else None,
        "peak_gib": round(max(row["memory_bytes"] for row in rows) / 2**30, 1),
        "data_wait_share": sum(row["data_wait_s"] for row in timed) / sum(row["step_s"] for row in timed),
        "first_step_s": round(rows[0]["step_s"], 1),
        "first_and_last_loss": [rows[0]["loss"], rows[-1]["loss"]],
        "process_s": round(time.monotonic() - started, 1),
        "steps": len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", help="run settings whose name contains this")
    arguments = parser.parse_args()
    print(__doc__)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in SETTINGS.items():
            if arguments.only and arguments.only not in name:
                continue
            result = measure(name, overrides, arguments.steps, Path(folder))
            results.append(result)
            print(json.dumps(result))
    if arguments.out:
        import torch

        facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "results": results}
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
