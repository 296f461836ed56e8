"""What recomputation costs and frees on one GPU: Llama-3.2-1B's shape, S 4096, bf16 compute, AdamW, blocks compiled.

    python benchmarks/recompute.py [--micro-batch 4 8 16] [--modes NAME …] [--eager] [--steps N] [--out FILE]

All settings run one after the other in this process, each the real training loop over synthetic tokens with one
micro-batch a step; one that runs out of memory is recorded as such, and none starts after --limit-s. Throughput is
the median over steps after the first two; every step ends with a device synchronisation. Peak is torch's peak
allocation over all steps. "held" is what one more forward leaves allocated for its backward; "stated" is the model's
own count of it for eager execution, so that compiled blocks should hold less and eager ones (--eager) the same. "above
rest" is the peak of that forward and its backward over what was allocated before, gradients and work in progress
included.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from meshwright.data import Corpus, prepare
from meshwright.job import Job, load_job
from meshwright.layout import recompute_modes, stages_of_rank
from meshwright.parallel import World, build
from meshwright.parallel.inputs import Inputs
from meshwright.train import choose_device, device_name, make_trainer, prepare_device
from meshwright.train.feed import training_loader

GIB = 2**30
MODES = {
    "none": '"none"',
    "selective": '"selective"',
    "full": '"full"',
    "every=2": "{every=2}",
    "budget 20 GiB": "{budget_gib=20}",
}
ROW = "{:>2}  {:<14} {:>9} {:>6} {:>9} {:>8} {:>8} {:>11}  {}"


class Rows:
    """Recorder and progress that keep a step's row and drop the rest."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def ignore(self, *args: Any, **kwargs: Any) -> None:
        """Not measured."""

    event = sample = step = evaluation = message = ignore


def measure(job: Job, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Train some steps, then look into one forward and backward."""
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    world, rows = World(device), Rows()
    engine, weights = build(job, world)
    training = make_trainer(job, corpus, engine, weights, rows, rows, world)
    outcome = training.run()
    timed = rows.rows[2:]
    peak = torch.cuda.max_memory_allocated()

    loader = training_loader(job, corpus, world)
    step = next(iter(loader))
    loader.close()
    tokens, arguments = Inputs(job, world).training(step.batch, step.valid_count, torch.tensor(1))
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = engine.modules[0](tokens, **arguments)
    held = torch.cuda.memory_allocated() - rest
    loss.backward()
    above = torch.cuda.max_memory_allocated() - rest
    return {
        "tokens_per_s": round(statistics.median(row["tokens_per_s"] for row in timed)),
        "step_s_min_median_max": [round(f(row["step_s"] for row in timed), 4) for f in (min, statistics.median, max)],
        "first_step_s": round(rows.rows[0]["step_s"], 1),
        "mfu": outcome.mfu,
        "peak_gib": round(peak / GIB, 2),
        "held_gib": round(held / GIB, 2),
        "above_rest_gib": round(above / GIB, 2),
        "losses": [row["loss"] for row in rows.rows],
    }


def stated_bytes(job: Job, modes: dict[int, str]) -> int:
    """What the model says one micro-batch holds between its forward and backward."""
    [(_, stage)] = stages_of_rank(job, None, 0)
    names = list(modes.values())
    return stage.kept((names.count("full"), names.count("selective"), names.count("none")))


def run(name: str, micro_batch: int, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    job = load_job(
        arguments.job,
        [
            f"memory.recompute={MODES[name]}",
            f"batch.micro_batch={micro_batch}",
            f"batch.global_batch={micro_batch}",
            f"run.compile={str(not arguments.eager).lower()}",
            f"run.steps={arguments.steps}",
            "schedule.warmup_steps=1",
        ],
    ).job
    corpus = prepare(job.data, job.model.vocab_size, lambda stage, share: None)
    modes = recompute_modes(job, None, 0)
    result: dict[str, Any] = {
        "modes": name,
        "micro_batch": micro_batch,
        "blocks": {mode: list(modes.values()).count(mode) for mode in ("full", "selective", "none")},
        "stated_gib": round(stated_bytes(job, modes) / GIB, 2),
    }
    started = time.monotonic()
    try:
        result |= measure(job, corpus, device)
    except torch.OutOfMemoryError as error:
        result["failed"] = f"out of memory: {str(error).splitlines()[0][:160]}"
    result["setting_s"] = round(time.monotonic() - started, 1)
    gc.collect()
    torch.cuda.empty_cache()
    return result


def shown(result: dict[str, Any]) -> str:
    failed = result.get("failed")
    mfu = result.get("mfu")
    tokens_per_s, peak, held = (result.get(key, "–") for key in ("tokens_per_s", "peak_gib", "held_gib"))
    numbers = [tokens_per_s, "–" if mfu is None else f"{mfu:.1%}", peak, held]
    blocks = " ".join(f"{count} {mode}" for mode, count in result["blocks"].items() if count)
    above = result.get("above_rest_gib", "–")
    note = blocks if failed is None else f"{blocks}; {failed[:60]}"
    return ROW.format(result["micro_batch"], result["modes"], *numbers, result["stated_gib"], above, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--job", default="pretrain-1b", help="a job file or recipe to take the rest from")
    parser.add_argument("--eager", action="store_true", help="do not compile blocks")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=165.0, help="start no setting after this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(__doc__)
    started = time.monotonic()
    job = load_job(arguments.job).job
    device = choose_device(job)
    if device.type != "cuda":
        raise SystemExit("this measures a GPU's memory, but there is no GPU")
    prepare_device(job, device)
    print(device_name(device), "torch", torch.__version__, "eager" if arguments.eager else "compiled", flush=True)
    print(ROW.format("b", "recompute", "tokens/s", "MFU", "peak GiB", "held", "stated", "above rest", "blocks"))
    results = []
    for micro_batch in arguments.micro_batch:
        for name in arguments.modes:
            if time.monotonic() - started > arguments.limit_s:
                print(f"not started after {arguments.limit_s:.0f} s: micro-batch {micro_batch}, {name}", flush=True)
                continue
            results.append(run(name, micro_batch, arguments, device))
            print(shown(results[-1]), flush=True)
    if arguments.out:
        facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "device": device_name(device)}
        facts |= {"eager": arguments.eager, "steps": arguments.steps, "results": results}
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
