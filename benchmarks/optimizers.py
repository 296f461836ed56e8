"""What each optimizer keeps, what its step costs, and the loss that the same training reaches with it.

    python benchmarks/optimizers.py [--out FILE]                 a small shape's states on CPU, and a small training
    python benchmarks/optimizers.py --device cuda [--out FILE]   the headline shape's states on a GPU, the same training

States: the bytes of all tensors the optimizer holds after some steps over random gradients, by parameter; the time of
a step is the median after the first; on a GPU also what the step holds besides masters, gradients and states at its
peak, from the allocator. Muon's step is matrix products (bf16 on a GPU), the others' is memory traffic.

Trainer: a Llama of 0.2M parameters on the Python standard library, the same batches for every optimizer, float32;
the loss is the held-out one after the last step. Each optimizer runs at the best of the rates it was tried at
(--rates tries them again); smaller formats run at the rate of their fp32 form.
"""

import argparse
import gc
import json
import statistics
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.data import Corpus, prepare
from meshwright.job import Job
from meshwright.job.load import load_job
from meshwright.model import build_architecture
from meshwright.parallel import World, build
from meshwright.train import Silent, Trainer, build_optimizer, states_of

RATES = {"adamw": 3e-3, "sgd": 0.03, "lion": 1e-3, "adafactor": 0.1, "muon": 1e-2}
TRIED = {
    "adamw": (1e-3, 3e-3, 1e-2),
    "sgd": (0.01, 0.03, 0.1),
    "lion": (3e-4, 1e-3, 3e-3),
    "adafactor": (3e-2, 0.1, 0.3),
    "muon": (3e-3, 1e-2, 3e-2),
}
SETTINGS = [
    ("adamw", "fp32"), ("adamw", "bf16"), ("adamw", "int8"),
    ("muon", "fp32"), ("muon", "bf16"), ("muon", "int8"),
    ("lion", "fp32"), ("lion", "bf16"), ("lion", "int8"),
    ("sgd", "fp32"), ("sgd", "bf16"), ("sgd", "int8"), ("adafactor", "fp32"),
]  # fmt: skip
CPU_SHAPE = ["model.vocab_size=4096", "model.width=256", "model.layers=2", "model.heads=4", "model.ffn_width=768"]
TRAINING = {
    "model": {
        "vocab_size": 512, "width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_width": 192,
        "max_sequence_length": 64,
    },
    "data": {"sources": ["builtin:stdlib"], "workers": 0},
    "batch": {"sequence_length": 64, "global_batch": 8, "micro_batch": 8},
    "evaluation": {"every_steps": 1000000, "batches": 32, "sample_tokens": 0},
    "run": {"device": "cpu"},
}  # fmt: skip


# ---- states and steps ----


def measure_states(job: Job, device: torch.device, steps: int) -> dict[str, Any]:
    """Bytes and seconds of one optimizer over a shape's parameters."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in build_architecture(job.model).model.named_parameters()}
    masters = {name: nn.Parameter(torch.randn(shape, device=device) * 0.02) for name, shape in shapes.items()}
    optimizer = build_optimizer(masters, job)
    times = []
    beside = None
    for _ in range(steps):
        for master in masters.values():
            master.grad = torch.randn_like(master).mul_(1e-3)
        before = begin_peak(device)
        started = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
            beside = torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())
        times.append(time.perf_counter() - started)
    kept = states_of(optimizer, masters)
    state_bytes = sum(tensor.nbytes for states in kept.values() for tensor in states.values())
    parameters = sum(prod(shape) for shape in shapes.values())
    return {
        "parameters": parameters,
        "state_bytes": state_bytes,
        "bytes_per_parameter": round(state_bytes / parameters, 3),
        "step_ms": round(1e3 * statistics.median(times[1:]), 2),
        "beside_mib": None if beside is None else round(beside / 2**20),
        "tensors": sorted({name for states in kept.values() for name in states}),
    }


def begin_peak(device: torch.device) -> int:
    """Reset the peak; returns what is allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


# ---- training ----


def train(corpus: Corpus, name: str, states: str, rate: float, steps: int) -> float:
    """The held-out loss after a training."""
    job = training_job(name, states, rate, steps)
    world = World(torch.device("cpu"))
    engine, weights = build(job, world)
    outcome = Trainer(job, corpus, engine, weights, Silent(), Silent(), world).run()
    assert outcome.val_loss is not None
    return outcome.val_loss


def training_job(name: str, states: str, rate: float, steps: int) -> Job:
    sections = TRAINING | {
        "optimizer": {"name": name, "lr": rate},
        "precision": {"optimizer_states": states},
        "run": {"device": "cpu", "steps": steps, "on_bad_step": "keep"},
    }
    return Job.model_validate(sections)


def try_rates(corpus: Corpus, steps: int) -> dict[str, dict[str, float]]:
    """Held-out losses of every optimizer at several rates."""
    tried: dict[str, dict[str, float]] = {}
    for name, rates in TRIED.items():
        tried[name] = {str(rate): round(train(corpus, name, "fp32", rate, steps), 4) for rate in rates}
        print(f"{name:10} {tried[name]}", flush=True)
    return tried


# ---- both ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=200, help="steps of the training")
    parser.add_argument("--rates", action="store_true", help="try several rates of each optimizer, and nothing else")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(__doc__)
    device = torch.device(arguments.device)
    corpus = prepare(training_job("adamw", "fp32", 1e-3, 1).data, TRAINING["model"]["vocab_size"])
    if arguments.rates:
        try_rates(corpus, arguments.steps)
        return
    rows = []
    print(f"{'optimizer':10} {'states':6} {'B/param':>8} {'step ms':>9} {'beside MiB':>10} {'val loss':>9}")
    for name, states in SETTINGS:
        row: dict[str, Any] = {"optimizer": name, "states": states, "lr": RATES[name]}
        overrides = [f"optimizer.name={name}", f"precision.optimizer_states={states}"]
        recipe, shape = ("demo", CPU_SHAPE) if device.type == "cpu" else ("pretrain-1b", [])
        try:
            row |= measure_states(load_job(recipe, [*overrides, *shape]).job, device, steps=4)
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        row["val_loss"] = round(train(corpus, name, states, RATES[name], arguments.steps), 4)
        rows.append(row)
        cells = [row.get("bytes_per_parameter", "-"), row.get("step_ms", "-"), row.get("beside_mib") or "-"]
        print(f"{name:10} {states:6} {cells[0]:>8} {cells[1]:>9} {cells[2]:>10} {row['val_loss']:>9}", flush=True)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "training": TRAINING | {"steps": arguments.steps},
        "results": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
