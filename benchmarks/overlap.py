"""What overlapping communication with computation is worth: two ranks in two network namespaces over a slow link.

    sudo python benchmarks/overlap.py [--rate 1gbit] [--repeats 3] [--out FILE]

Each rank has its own network namespace and core; the link between them is shaped with a token bucket. The job is
zero 3 (parameters gathered for every use, forward and backward) with `layout.prefetch` 0 and 1; settings alternate and
each repeat is a fresh pair of processes. Printed: the median step time of each setting and their ratio.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from wire import Wire

STEPS = 6


def worker(prefetch: int) -> None:
    """One rank: build the job's model and time its steps; rank 0 prints them."""
    import torch

    from meshwright.job import Job
    from meshwright.parallel import build, join_world

    torch.set_num_threads(1)
    job = Job.model_validate(
        {
            "model": {"vocab_size": 256, "width": 512, "layers": 6, "heads": 8, "ffn_width": 1536},
            "batch": {"sequence_length": 128, "global_batch": 4, "micro_batch": 2},
            "layout": {"dp_shard": 2, "zero": 3, "prefetch": prefetch},
        }
    )
    world = join_world(job, torch.device("cpu"))
    engine, weights = build(job, world)
    [model] = engine.modules
    tokens = torch.randint(0, 256, (2, 128))
    times = []
    for _ in range(STEPS):
        world.barrier()
        started = time.perf_counter()
        weights.start_micro_batch(last=True)
        model(tokens, tokens, 512).backward()
        weights.zero_gradients()
        world.barrier()
        times.append(time.perf_counter() - started)
    if world.rank == 0:
        print(json.dumps(times[1:]))


def measure(link: Wire, prefetch: int) -> list[float]:
    """Step times of a fresh pair of processes."""
    outputs = link.run_pair([__file__, "--worker", str(prefetch)], timeout_s=300)
    times: list[float] = json.loads(outputs[0].strip().splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=int)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker)
        return
    print(__doc__)
    times: dict[int, list[float]] = {0: [], 1: []}
    with Wire(arguments.rate, mtu=9000) as link:
        for _ in range(arguments.repeats):
            for prefetch in times:
                times[prefetch] += measure(link, prefetch)
    medians = {prefetch: statistics.median(values) for prefetch, values in times.items()}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "rate": arguments.rate,
        "step_s_without_overlap": round(medians[0], 3),
        "step_s_with_overlap": round(medians[1], 3),
        "ratio": round(medians[0] / medians[1], 3),
        "spread_s": {str(prefetch): [round(min(v), 3), round(max(v), 3)] for prefetch, v in times.items()},
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
