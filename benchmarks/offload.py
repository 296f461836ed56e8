"""A model whose states do not fit on the card: a 7B one trains on 24 GiB with its optimizer in host memory.

    python benchmarks/offload.py [--out FILE] [--steps N] [--only TEXT] [--list]

Each setting is a separate process that builds a job and runs the real training loop on synthetic tokens; nothing is
saved. "24 GiB" is a limit set in torch's allocator (`set_per_process_memory_fraction`), beyond which it reports that it
is out of memory; what the driver and libraries take (below 1 GiB) comes on top of it. Throughput is the median over
steps after the first (which allocates states); each step ends with a device synchronisation. MFU counts
6·P_matmul + 12·L·S·A FLOPs a token, recomputation not counted, against the card's dense peak. Device peaks are torch's;
the host peak is the process's largest resident set, page-locked memory included. Traffic is what the loop itself counts
(`offload_*` in a step's row), the median of a step. Copy rates are those of one GiB in page-locked memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GIB = 2**30
LLAMA_7B = {"model": {"preset": "llama-2-7b"}, "memory": {"recompute": "full", "offload": ["optimizer"]}}
SETTINGS: dict[str, tuple[float | None, dict[str, Any]]] = {
    "7b in 24 GiB, 16-bit gradients": (
        24,
        {
            **LLAMA_7B,
            "batch": {"sequence_length": 4096, "micro_batch": 4, "global_batch": 16},
            "precision": {"compute": "bf16", "gradients": "bf16"},
        },
    ),
    "8b on the whole card, 16-bit gradients, no offload": (
        None,
        {
            "model": {"preset": "llama-3-8b"},
            "memory": {"recompute": "full"},
            "batch": {"sequence_length": 8192, "micro_batch": 1, "global_batch": 2},
            "precision": {"compute": "bf16", "gradients": "bf16"},
        },
    ),
    "7b in 24 GiB, 32-bit gradients": (
        24,
        {
            **LLAMA_7B,
            "batch": {"sequence_length": 4096, "micro_batch": 4, "global_batch": 16},
            "precision": {"compute": "bf16"},
        },
    ),
    "7b in 24 GiB, activations too": (
        24,
        {
            "model": {"preset": "llama-2-7b"},
            "memory": {"recompute": "full", "offload": ["optimizer", "activations"]},
            "batch": {"sequence_length": 4096, "micro_batch": 6, "global_batch": 18},
            "precision": {"compute": "bf16", "gradients": "bf16"},
        },
    ),
    "7b in 24 GiB, parameters and activations too": (
        24,
        {
            "model": {"preset": "llama-2-7b"},
            "memory": {"recompute": "full", "offload": ["params", "activations"]},
            "batch": {"sequence_length": 4096, "micro_batch": 16, "global_batch": 16},
            "precision": {"compute": "bf16", "gradients": "bf16"},
        },
    ),
    "tiny, to try the script": (
        None,
        {
            "model": {"preset": "tiny-llama"},
            "memory": {"offload": ["optimizer"]},
            "batch": {"sequence_length": 64, "micro_batch": 2, "global_batch": 4},
        },
    ),
}
DEFAULT = list(SETTINGS)[:2]
"""What a call without --only runs; the others take as long again."""


class Rows:
    """Recorder and progress that keep the rows and print them as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        shown = ("step", "loss", "grad_norm", "step_s", "offload_wait_s", "offload_update_s")
        print("   ", {key: row[key] for key in shown if key in row}, file=sys.stderr, flush=True)

    def ignore(self, *args: Any, **kwargs: Any) -> None:
        """Not measured."""

    event = sample = step = evaluation = message = ignore


def train(name: str, steps: int) -> dict[str, Any]:
    """One setting, in this process."""
    import torch

    from meshwright.data import prepare
    from meshwright.job import Job, model_preset
    from meshwright.layout import require_layout
    from meshwright.model import count_parameters
    from meshwright.parallel import World, build
    from meshwright.train import choose_device, device_name, make_trainer, prepare_device, training_loader

    cap_gib, sections = SETTINGS[name]
    common = {
        "data": {"sources": ["builtin:synthetic"]},
        "optimizer": {"lr": 2e-5},
        "schedule": {"warmup_steps": 1},
        "evaluation": {"every_steps": 0},
        "run": {"steps": steps, "on_bad_step": "stop"},
    }
    shape = model_preset(sections["model"]["preset"])
    job = Job.model_validate({**common, **sections, "model": shape})
    require_layout(job, 1)
    device = choose_device(job)
    cuda = device.type == "cuda"
    if cuda and cap_gib is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total, device)
    prepare_device(job, device)
    world = World(device)
    rates = copy_rates(device) if cuda else {}
    corpus = prepare(job.data, job.model.vocab_size, lambda stage, share: None)
    loader = training_loader(job, corpus, world)
    loader.start()
    started = time.perf_counter()
    engine, weights = build(job, world)
    build_s = time.perf_counter() - started
    rows = Rows()
    outcome = make_trainer(job, corpus, engine, weights, rows, rows, world).run(loader=loader)
    timed = rows.rows[1:]

    def middle(field: str) -> float:
        return statistics.median(row[field] for row in timed)

    result: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "job": sections,
        "parameters": count_parameters(job.model),
        "allocator_limit_gib": cap_gib,
        "steps": len(rows.rows),
        "build_s": round(build_s, 1),
        "first_step_s": round(rows.rows[0]["step_s"], 2),
        "step_s": round(middle("step_s"), 3),
        "tokens_per_step": job.tokens_per_step,
        "tokens_per_s": round(middle("tokens_per_s")),
        "mfu": outcome.mfu,
        "losses": [row["loss"] for row in rows.rows],
        "host_peak_gib": round(host_peak_bytes() / GIB, 2),
        **rates,
    }
    if cuda:
        result["device_peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        result["device_peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    if job.memory.offload:
        for direction in ("to_host", "to_device"):
            result[f"{direction}_gib_per_step"] = round(middle(f"offload_{direction}_bytes") / GIB, 2)
        result |= {field: round(middle(f"offload_{field}"), 3) for field in ("wait_s", "update_s")}
    return result


def copy_rates(device: Any) -> dict[str, float]:
    """GB/s between host and device, and the host's own for one copy by all threads."""
    import torch

    from meshwright.parallel.offload.host import host_buffer

    host, there = host_buffer(GIB, torch.uint8, device), torch.empty(GIB, dtype=torch.uint8, device=device)
    other = torch.zeros(GIB, dtype=torch.uint8)
    ways = {"to_device_gb_per_s": (there, host), "to_host_gb_per_s": (host, there), "host_copy_gb_per_s": (other, host)}
    rates = {}
    for name, (target, source) in ways.items():
        target.copy_(source)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates[name] = round(4 * GIB / (time.perf_counter() - started) / 1e9, 1)
    return rates


def host_peak_bytes() -> int:
    """The largest resident set of this process."""
    import resource

    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, steps: int, timeout_s: float) -> dict[str, Any]:
    """One setting in its own process; how it failed, if it did."""
    command = [sys.executable, __file__, "--one", name, "--steps", str(steps)]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired as error:
        told = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr or ""
        return {"setting": name, "failed": f"not finished after {timeout_s:.0f} s", "stderr": told[-2000:]}
    print(done.stderr[-1500:] if done.returncode else done.stderr, end="", file=sys.stderr)
    if done.returncode:
        return {"setting": name, "failed": done.returncode, "stderr": done.stderr[-2000:]}
    seconds = {"process_s": round(time.monotonic() - started, 1)}
    return {"setting": name, **json.loads(done.stdout.splitlines()[-1]), **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", help="run settings whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the names of all settings")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one setting")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(SETTINGS))
        return
    if arguments.one:
        print(json.dumps(train(arguments.one, arguments.steps)))
        return
    print(__doc__)
    results = []
    for name in [each for each in SETTINGS if arguments.only in each] if arguments.only else DEFAULT:
        print(f"{name} …", file=sys.stderr, flush=True)
        results.append(measure(name, arguments.steps, arguments.timeout))
        print(json.dumps(results[-1]), flush=True)
        if arguments.out:
            facts = {"date": time.strftime("%Y-%m-%d"), "results": results}
            arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
