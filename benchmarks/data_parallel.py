"""Data parallelism in one Python process with threads, as torch.nn.DataParallel does it, against one process per rank.

    python benchmarks/data_parallel.py [--rounds 8] [--out FILE]

torch.nn.DataParallel itself needs several GPUs: on a CPU it calls its module once, without replicas, and its
parallel_apply asks for a CUDA stream (both are tried here and what happens is in the result). So this measures the same
steps on two CPU cores: one optimizer step's gradients of a Llama-shaped model, 2 × 2 sequences of 128 tokens, fp32, one
torch thread per worker.

whole        one process, one thread, the whole batch: what both are compared with
threads      DataParallel's own order: the weights are copied to two replicas, two threads run their forwards, the
             losses are gathered, one backward runs through both and adds up the gradients (on a CPU autograd runs it
             in one thread; GPUs have one each)
threads, own backward    kinder: each thread runs its own forward and backward, then the gradients are added
processes    two processes under torch's DistributedDataParallel over gloo

All take turns round by round; while one process works alone, the other waits. Every way's gradients are checked against
the whole batch's. Printed: median seconds per step; way / processes as the median and the range over the rounds; and
the same of the least times, which other programs on the machine disturb least.
"""

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.spawn import spawn

from meshwright.job import Job
from meshwright.parallel import World, build

SHAPES = {
    "small, 0.5M parameters": {"vocab_size": 256, "width": 64, "layers": 8, "heads": 4, "ffn_width": 192},
    "large, 14M parameters": {"vocab_size": 256, "width": 512, "layers": 4, "heads": 8, "ffn_width": 1536},
}
WAYS = ("whole", "threads", "threads, own backward", "processes")
SEQUENCE, BATCH = 128, 4


def built(shape: dict[str, int]) -> nn.Module:
    """The job's model on one device, the same in every process."""
    batch = {"sequence_length": SEQUENCE, "global_batch": BATCH, "micro_batch": BATCH}
    [model] = build(Job.model_validate({"model": shape, "batch": batch}), World(torch.device("cpu")))[0].modules
    return model


class Threads:
    """Two replicas and two threads in this process."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._replicas = model, [copy.deepcopy(model) for _ in range(2)]
        self._pool = ThreadPoolExecutor(2)

    def as_data_parallel(self, tokens: Tensor) -> None:
        copies = [self._copies() for _ in self._replicas]
        losses = self._pool.map(self._forward, range(2), copies, tokens.chunk(2))
        torch.stack(list(losses)).sum().backward()

    def own_backward(self, tokens: Tensor) -> None:
        def both(number: int, share: Tensor) -> tuple[Tensor, ...]:
            own = {name: value.detach().clone().requires_grad_() for name, value in self._model.named_parameters()}
            return torch.autograd.grad(self._forward(number, own, share), list(own.values()))

        first, second = self._pool.map(both, range(2), tokens.chunk(2))
        for parameter, one, other in zip(self._model.parameters(), first, second, strict=True):
            parameter.grad = one.add_(other)

    def _copies(self) -> dict[str, Tensor]:
        """As torch's replicate: copies through which gradients come back to the one model."""
        return {name: value.clone() for name, value in self._model.named_parameters()}

    def _forward(self, number: int, values: dict[str, Tensor], share: Tensor) -> Tensor:
        loss: Tensor = functional_call(self._replicas[number], values, (share, share, BATCH * SEQUENCE))
        return loss


def worker(rank: int, rounds: int, file: str, out: str) -> None:
    """One of the two processes; the first runs the ways of one process, too."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    results = {name: measure(shape, rank, rounds) for name, shape in SHAPES.items()}
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(shape: dict[str, int], rank: int, rounds: int) -> dict[str, Any]:
    """Times of every way, and how far their gradients are from the whole batch's."""
    model = built(shape)
    ranks = nn.parallel.DistributedDataParallel(built(shape))
    threads = Threads(model)
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))

    def whole() -> None:
        model(tokens, tokens, BATCH * SEQUENCE).backward()

    def processes() -> None:
        share = tokens.chunk(2)[rank]
        ranks(share, share, BATCH * SEQUENCE // 2).backward()  # DDP takes the mean of the ranks

    alone: dict[str, Callable[[], None]] = {
        "whole": whole,
        "threads": lambda: threads.as_data_parallel(tokens),
        "threads, own backward": lambda: threads.own_backward(tokens),
    }
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    truth: list[Tensor] = []
    for _ in range(rounds + 1):
        for way in WAYS:
            model.zero_grad(set_to_none=True)
            ranks.zero_grad(set_to_none=True)
            dist.barrier()
            started = time.perf_counter()
            if way == "processes":
                processes()
            elif rank == 0:
                alone[way]()
            if way == "processes" or rank == 0:
                times[way].append(time.perf_counter() - started)
            dist.barrier()  # outside the timing: DDP itself ends once both ranks have the sum
            if rank == 0:
                found = [p.grad for p in (ranks if way == "processes" else model).parameters()]
                if way == "whole":
                    truth = [each.clone() for each in found]
                for one, true in zip(found, truth, strict=True):
                    torch.testing.assert_close(one, true, rtol=1e-4, atol=1e-6)
    if rank:
        return {}
    steady = {way: values[1:] for way, values in times.items()}
    result: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    for way, values in steady.items():
        ratios = [value / two for value, two in zip(values, steady["processes"], strict=True)]
        result[way] = {
            "step_s": round(statistics.median(values), 4),
            "over_processes": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "of_least_times": round(min(values) / min(steady["processes"]), 3),
        }
    return result


def tried() -> dict[str, str]:
    """What torch's own single-process data parallelism does here."""
    layer, calls = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    nn.DataParallel(layer)(torch.ones(4, 2))
    found = {"torch.nn.DataParallel": f"calls its module {len(calls)} time(s), with the whole batch, without replicas"}
    try:
        nn.parallel.parallel_apply([layer, layer], [torch.ones(2, 2)] * 2)
        found["torch.nn.parallel.parallel_apply"] = "runs"
    except Exception as error:
        found["torch.nn.parallel.parallel_apply"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    found["GPUs here"] = f"{torch.cuda.device_count()}; DataParallel needs two, so one GPU cannot measure it either"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(__doc__)
    from tempfile import TemporaryDirectory

    facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "how": __doc__}
    facts |= {"load_when_begun": round(os.getloadavg()[0], 1), "torch_itself": tried()}
    print(json.dumps(facts["torch_itself"], indent=2))
    with TemporaryDirectory() as folder:
        told = Path(folder) / "result.json"
        spawn(worker, (arguments.rounds, f"{folder}/meet", str(told)), nprocs=2)
        facts["results"] = json.loads(told.read_text())
    for name, result in facts["results"].items():
        print(f"{name} ({result['parameters']:,}), {arguments.rounds} rounds")
        for way in WAYS:
            found = result[way]
            ratio = f"{found['over_processes']:.2f} {found['range']}, of the least {found['of_least_times']:.2f}"
            print(f"  {way:22} {1e3 * found['step_s']:8.1f} ms  this / processes {ratio}")
    out = arguments.out or Path(__file__).parent / "results" / f"{facts['date']}-data-parallel-2cores.json"
    out.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
