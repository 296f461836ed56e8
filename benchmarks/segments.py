"""Memory and speed against the length of recomputed segments on one GPU, next to what the planner says of each job.

    python benchmarks/segments.py [--models 1b 8b deep] [--steps N] [--limit-s S] [--out FILE]
    python benchmarks/segments.py --cpu-smoke        # the same with tiny models on a CPU, where no memory is counted

1b is the recipe pretrain-1b as it is; 8b is llama-3-8b with 8-bit optimizer states and 16-bit gradients, which leave
room for activations on a card of 139 GiB; deep is a model of 128 narrow blocks, where the optimum is not at one block.
8b and deep run two micro-batches per step, so that gradients are there all the time and the peak follows activations.
Every setting is its own process: some steps of the real training loop over synthetic tokens, blocks compiled, then one
more forward. "peak" is torch's peak allocation over the steps, "held" what that forward leaves allocated for its
backward. Throughput is the median over steps after the first two. The planner's columns are predicted before the run,
for an H200 by name. A setting that runs out of memory is recorded as such; none starts after --limit-s. --out is
written after every setting.
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

GIB = 2**30
RESULTS = Path(__file__).parent / "results" / "segments.json"
MODELS: dict[str, tuple[list[str], list[int]]] = {
    "1b": ([], [1, 2, 4, 8, 16]),
    "8b": (
        [
            'model.preset="llama-3-8b"',
            "batch.micro_batch=2",
            "batch.global_batch=4",
            'precision.optimizer_states="int8"',
            'precision.gradients="bf16"',
        ],
        [1, 2, 4, 8, 16, 32],
    ),
    "deep": (
        [
            "model.layers=128",
            "model.width=1024",
            "model.heads=16",
            "model.kv_heads=16",
            "model.head_dim=64",
            "model.ffn_width=2816",
            "batch.micro_batch=8",
            "batch.global_batch=16",
        ],
        [1, 2, 3, 4, 8, 16],
    ),
}
TINY = [
    "model.layers=6", "model.width=32", "model.heads=4", "model.kv_heads=2", "model.head_dim=8", "model.ffn_width=48",
    "model.vocab_size=64", "batch.sequence_length=32", "batch.micro_batch=1", "batch.global_batch=2",
    "run.compile=false",
]  # fmt: skip
ROW = "{:<5} {:<13} {:>9} {:>9} {:>6} {:>9} {:>9} {:>9} {:>9}  {}"


def overrides_of(model: str, recompute: str, steps: int, smoke: bool) -> list[str]:
    """A setting as overrides of pretrain-1b."""
    given = [*MODELS[model][0], *(TINY if smoke else [])]
    shown = recompute if recompute.startswith("{") else f'"{recompute}"'
    return [*given, f"memory.recompute={shown}", f"run.steps={steps}", "schedule.warmup_steps=1"]


def planned(overrides: list[str]) -> dict[str, Any]:
    """The planner's peak, what it expects after a forward, and its throughput on an H200."""
    from meshwright.job import load_job
    from meshwright.job.devices import Cluster
    from meshwright.layout import recompute_modes, stages_of_rank
    from meshwright.plan import predict
    from meshwright.plan.kept import block_bytes
    from meshwright.plan.predict import own_software

    job = load_job("pretrain-1b", overrides).job
    prediction, software = predict(job, Cluster(gpu="h200")), own_software(job)
    [(_, stage)] = stages_of_rank(job, None, 0)
    modes = recompute_modes(job, None, 0).values()
    kept = stage.fixed + sum(block_bytes(job, software, mode)[0] for mode in modes)
    return {
        "planned_peak_gib": round(prediction.fullest.allocated / GIB, 2),
        "planned_held_gib": round(kept / GIB, 2),
        "planned_tokens_per_s": round(prediction.tokens_per_s_per_gpu),
        "planned_terms_gib": {name: round(size / GIB, 2) for name, size in prediction.fullest.terms.items()},
    }


def measure(overrides: list[str]) -> dict[str, Any]:
    """Train some steps in this process, then leave one more forward's activations allocated."""
    import torch

    from meshwright.data import prepare
    from meshwright.job import load_job
    from meshwright.parallel import World, build
    from meshwright.parallel.inputs import Inputs
    from meshwright.train import choose_device, device_name, make_trainer, prepare_device
    from meshwright.train.feed import training_loader

    rows: list[dict[str, Any]] = []

    class Recorder:
        """Keeps the steps' rows, drops the rest."""

        def metric(self, row: dict[str, Any]) -> None:
            rows.append(row)

        def ignore(self, *args: Any, **kwargs: Any) -> None:
            """Not measured."""

        event = sample = step = evaluation = message = ignore

    job = load_job("pretrain-1b", overrides).job
    device = choose_device(job)
    prepare_device(job, device)
    on_gpu = device.type == "cuda"
    corpus = prepare(job.data, job.model.vocab_size, lambda stage, share: None)
    world, recorder = World(device), Recorder()
    found = {"device": device_name(device), "torch": torch.__version__}
    try:
        engine, weights = build(job, world)
        make_trainer(job, corpus, engine, weights, recorder, recorder, world).run()
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        loader = training_loader(job, corpus, world)
        batch = next(iter(loader))
        loader.close()
        micro = batch.batch.split(job.batch.micro_batch)[0]
        tokens, arguments = Inputs(job, world).training(micro, batch.valid_count, torch.tensor(1))
        rest = torch.cuda.memory_allocated() if on_gpu else 0
        loss = engine.modules[0](tokens, **arguments)
        held = torch.cuda.memory_allocated() - rest if on_gpu else None
        loss.backward()
    except torch.OutOfMemoryError as error:
        return found | {"failed": f"out of memory: {str(error).splitlines()[0][:160]}"}
    timed = rows[2:] or rows
    return found | {
        "tokens_per_s": round(statistics.median(row["tokens_per_s"] for row in timed)),
        "step_s": [round(row["step_s"], 4) for row in rows],
        "mfu": timed[-1]["mfu"],
        "peak_gib": None if peak is None else round(peak / GIB, 2),
        "held_gib": None if held is None else round(held / GIB, 2),
        "losses": [row["loss"] for row in rows],
    }


def in_a_process(overrides: list[str], folder: Path) -> dict[str, Any]:
    """One setting, measured by a process of its own."""
    out = folder / "one.json"
    out.unlink(missing_ok=True)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(overrides), "--out", str(out)], stdout=subprocess.DEVNULL
    )
    found = json.loads(out.read_text()) if out.exists() else {"failed": f"exit code {done.returncode}"}
    return found | {"process_s": round(time.monotonic() - started, 1)}


def minimum(results: list[dict[str, Any]], model: str, key: str) -> int | None:
    """The blocks of a segment with the lowest peak."""
    peaks = {r["segments"]: r[key] for r in results if r["model"] == model and r["segments"] and r.get(key) is not None}
    return min(peaks, key=lambda blocks: peaks[blocks]) if peaks else None


def shown(result: dict[str, Any]) -> str:
    """A row of the table."""
    keys = ("peak_gib", "held_gib", "tokens_per_s", "planned_peak_gib", "planned_held_gib", "planned_tokens_per_s")
    values = ["–" if result.get(key) is None else result[key] for key in keys]
    mfu = result.get("mfu")
    numbers = [values[0], values[1], "–" if mfu is None else f"{mfu:.1%}", *values[2:]]
    return ROW.format(result["model"], result["recompute"], *numbers, result.get("failed", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=540.0, help="start no setting after this")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny models, to try this script without a GPU")
    parser.add_argument("--one", help="a setting to measure in this process, as JSON")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/segments.json; none with --cpu-smoke")
    arguments = parser.parse_args()
    if arguments.one:
        arguments.out.write_text(json.dumps(measure(json.loads(arguments.one))))
        return
    print(__doc__)
    out = arguments.out or (None if arguments.cpu_smoke else RESULTS)
    titles = ("peak GiB", "held", "MFU", "tokens/s", "planned", "held", "tokens/s")
    print(ROW.format("model", "recompute", *titles, ""), flush=True)
    started, results = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            settings: list[tuple[str, int | None]] = [("none", None), ("selective", None), ("full", None)]
            settings += [(f"{{segments={blocks}}}", blocks) for blocks in MODELS[model][1]]
            for recompute, blocks in settings:
                result: dict[str, Any] = {"model": model, "recompute": recompute, "segments": blocks}
                overrides = overrides_of(model, recompute, arguments.steps, arguments.cpu_smoke)
                result |= {"overrides": overrides} | planned(overrides)
                if time.monotonic() - started < arguments.limit_s:
                    result |= in_a_process(overrides, Path(folder))
                else:
                    result["failed"] = f"not started after {arguments.limit_s:.0f} s"
                results.append(result)
                print(shown(result), flush=True)
                if out is not None:
                    write(out, results, arguments)
    for model, (measured, expected) in minima(results, arguments.models).items():
        print(f"{model}: lowest peak measured at segments of {measured}, planned at {expected}")


def minima(results: list[dict[str, Any]], models: list[str]) -> dict[str, tuple[int | None, int | None]]:
    """Per model, the blocks of a segment with the lowest peak: measured and planned."""
    keys = ("peak_gib", "planned_peak_gib")
    return {model: (minimum(results, model, keys[0]), minimum(results, model, keys[1])) for model in models}


def write(out: Path, results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """All that is known so far."""
    first = next((result for result in results if "device" in result), {})
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": first.get("device"),
        "torch": first.get("torch"),
        "steps": arguments.steps,
        "how": "benchmarks/segments.py: each setting its own process, blocks compiled, synthetic tokens",
        "lowest_peak_at_segments_of": {
            model: {"measured": measured, "planned": expected}
            for model, (measured, expected) in minima(results, arguments.models).items()
        },
        "results": results,
    }
    out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
