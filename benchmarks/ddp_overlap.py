"""What overlapping the sum of gradients with backward is worth: two ranks in two network namespaces over slow links.

    sudo python benchmarks/ddp_overlap.py [--rates 250mbit …] [--repeats 2] [--out FILE]

Each rank has its own namespace and core; the link between them is shaped with a token bucket. Six blocks of 3.4M
parameters, 2 × 64 tokens per rank, fp32. Every way below sends the same gradients (the bytes are in the result) and
ends with the same ones, which is checked; they take turns step by step in one pair of processes, and every repeat is a
fresh pair.

none         forward and backward alone, nothing is sent
after        one all-reduce of all gradients in one buffer, after backward
ddp 25 MB    torch's DistributedDataParallel: buckets are summed while backward goes on (25 MB is its default)
ddp 5 MB     the same with smaller buckets
zero 0       what a job with layout.dp_replicate = 2 runs: `fully_shard` over a mesh of replicas, a sum per block

On a GPU `fully_shard` sums in a stream of its own, during backward. A CPU has no streams: there each of its all-reduces
is waited for, so that "zero 0" shows what a CPU run pays, not what a GPU run gains. Printed for each rate: median
seconds per step; after / way as the median and the range over the rounds; and the same of the least times, which other
programs on the machine disturb least.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wire import Wire

ROUNDS = 5
WAYS = ("none", "after", "ddp 25 MB", "ddp 5 MB", "zero 0")


def worker(rounds: int) -> None:
    """One rank: every way in turn, after one round of warm-up; rank 0 prints their times."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from meshwright.job import Job
    from meshwright.parallel import World, build, join_world

    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "model": {"vocab_size": 256, "width": 512, "layers": 6, "heads": 8, "ffn_width": 1536},
        "batch": {"sequence_length": 64, "global_batch": 4, "micro_batch": 2},
    }
    replicated = Job.model_validate({**settings, "layout": {"dp_replicate": 2, "zero": 0}})
    alone = Job.model_validate({**settings, "batch": {**settings["batch"], "global_batch": 2}})
    world = join_world(replicated, torch.device("cpu"))
    engine, weights = build(replicated, world)

    def single() -> nn.Module:
        [model] = build(alone, World(torch.device("cpu")))[0].modules
        return model

    plain = single()
    ddp = {f"ddp {size} MB": nn.parallel.DistributedDataParallel(single(), bucket_cap_mb=size) for size in (25, 5)}
    parameters = list(plain.parameters())
    flat = torch.empty(sum(parameter.numel() for parameter in parameters))
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(world.rank))

    def backward(model: nn.Module) -> None:
        model(tokens, tokens, 256).backward()

    def after() -> None:
        backward(plain)
        torch.cat([gradient(parameter).flatten() for parameter in parameters], out=flat)
        dist.all_reduce(flat)
        for parameter, summed in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            gradient(parameter).copy_(summed.view_as(parameter))

    def zero_0() -> None:
        weights.start_micro_batch(last=True)
        backward(engine.modules[0])
        weights.collect_gradients()

    def gradient(parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad

    ways: dict[str, Callable[[], None]] = {"none": lambda: backward(plain), "after": after, "zero 0": zero_0}
    ways |= {name: lambda model=model: backward(model) for name, model in ddp.items()}

    def gradients(way: str) -> list[Tensor]:
        """DDP divides by the ranks; the others leave the sum."""
        if way == "zero 0":
            return [gradient(weights.masters[name]) for name, _ in plain.named_parameters()]
        factor = 2.0 if way in ddp else 1.0
        model = ddp[way].module if way in ddp else plain
        return [factor * gradient(parameter) for parameter in model.parameters()]

    def clear() -> None:
        for model in (plain, *ddp.values()):
            model.zero_grad(set_to_none=True)
        weights.zero_gradients()

    times: dict[str, list[float]] = {way: [] for way in WAYS}
    truth: list[Tensor] = []
    for number in range(rounds + 1):
        for way in WAYS:
            world.barrier()
            started = time.perf_counter()
            ways[way]()
            world.barrier()
            times[way].append(time.perf_counter() - started)
            if way == "after":
                truth = [each.clone() for each in gradients(way)]
            elif way != "none" and number == 0:
                for found, true in zip(gradients(way), truth, strict=True):
                    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-7)
            clear()
    if world.rank == 0:
        print(json.dumps({"bytes": flat.nbytes, "times": {way: values[1:] for way, values in times.items()}}))


def measure(rate: str, repeats: int) -> dict[str, Any]:
    """All rounds over a link of this rate."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    size = 0
    for _ in range(repeats):
        with Wire(rate, mtu=9000) as link:
            outputs = link.run_pair([__file__, "--worker", str(ROUNDS)], timeout_s=900)
        found = json.loads(outputs[0].strip().splitlines()[-1])
        size = found["bytes"]
        for way, values in found["times"].items():
            times[way] += values
    result: dict[str, Any] = {"rate": rate, "gradient_bytes": size, "rounds": len(times["after"]), "ways": {}}
    for way, values in times.items():
        ratios = [after / value for after, value in zip(times["after"], values, strict=True)]
        result["ways"][way] = {
            "step_s": round(statistics.median(values), 3),
            "step_s_range": [round(min(values), 3), round(max(values), 3)],
            "after_over_this": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "of_least_times": round(min(times["after"]) / min(values), 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["250mbit", "500mbit", "1gbit"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker)
        return
    print(__doc__)
    import os

    import torch

    facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "how": __doc__}
    facts["load_when_begun"] = round(os.getloadavg()[0], 1)
    results = []
    for rate in arguments.rates:
        results.append(measure(rate, arguments.repeats))
        print(f"{rate}: {results[-1]['gradient_bytes'] / 1e6:.0f} MB of gradients, {results[-1]['rounds']} rounds")
        for way, found in results[-1]["ways"].items():
            ratio = f"{found['after_over_this']:.2f} {found['range']}, of the least {found['of_least_times']:.2f}"
            print(f"  {way:10} {found['step_s']:6.2f} s  after / this {ratio}", flush=True)
    out = arguments.out or Path(__file__).parent / "results" / f"{facts['date']}-ddp-overlap.json"
    out.write_text(json.dumps({**facts, "results": results}, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
