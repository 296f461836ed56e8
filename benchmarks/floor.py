"""Where each microsecond of a step goes: every kernel next to the least time that its work needs on this device.

    python benchmarks/floor.py [--setting 1b-untied-mb8]… [--rows N] [--out FILE]
    python benchmarks/floor.py --setting tiny        # on a CPU: shows that it runs

Settings are those of peers/shapes.py: by default the headline step (1B shape, S 4096, micro-batch 8) and the 8B step at
S 8192, bf16, compiled. Each is a process of its own that trains on random tokens. The step is the median of --steps
after --warmup, without a profiler; then two steps are profiled with the shapes of all operations. What the device does
not do in a step (the median step less the profiled steps' busy time) is "gaps of the host". The floors are in
kernel_floors.py; products are timed here for every shape of the step, in all four layouts of their operands, on random
numbers, and the copy's rate counts bytes read and written. --out is rewritten after every setting.
"""

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from kernel_floors import Rates, Row, Shape, busy_s, groups_of, read_trace, rows_of, with_floors
from moe_floor import UPDATE_BYTES, other_parts
from run import our_command, surroundings
from shapes import SETTINGS, Setting

from meshwright.cost import trained_parameters
from meshwright.job import load_job
from meshwright.parallel import World, build
from meshwright.train import (
    Silent,
    choose_attention,
    choose_device,
    device_name,
    make_trainer,
    open_corpus,
    prepare_device,
    training_loader,
)

DEFAULT = ("1b-untied-mb8", "8b-8k")
PROFILED_STEPS = 2
LIMIT_S = 300
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    """Measure every setting in its own process, print its tables, write all."""
    asked = parse()
    if asked.inside:
        asked.out.write_text(json.dumps(measured(SETTINGS[asked.inside], asked), ensure_ascii=False), encoding="utf-8")
        return
    print(__doc__)
    results = []
    for name in asked.setting or DEFAULT:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            words = ["--inside", name, "--steps", str(asked.steps), "--warmup", str(asked.warmup), "--out", str(file)]
            words += [word for field in asked.set for word in ("--set", field)]
            command = [sys.executable, __file__, *words]
            done = subprocess.run(command, env=surroundings(), capture_output=True, text=True, timeout=LIMIT_S)
            if not file.exists():
                print(f"{name}: failed\n{done.stderr[-2000:]}", flush=True)
                continue
            results.append({"setting": name, **json.loads(file.read_text(encoding="utf-8"))})
        show(results[-1], asked.rows)
        if asked.out:
            facts = {"date": time.strftime("%Y-%m-%d %H:%M"), "how": __doc__, "results": results}
            asked.out.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(len(results) < len(asked.setting or DEFAULT))


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dense = [name for name, setting in SETTINGS.items() if not setting.experts]
    parser.add_argument("--setting", action="append", choices=dense, help=f"{' and '.join(DEFAULT)} by default")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rows", type=int, default=30, help="kernels to show, those with the largest excess")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the job")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


class Watch(Silent):
    """Keeps the time of plain steps, then profiles the last ones."""

    def __init__(self, warmup: int, steps: int, cuda: bool, trace: Path) -> None:
        self.step_s: list[float] = []
        self._first, self._last, self._trace = warmup, warmup + steps, trace
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
        self._profile = profile(activities=activities, record_shapes=True)

    def metric(self, row: dict[str, Any]) -> None:
        """After every step, which has waited for the device."""
        if self._first < row["step"] <= self._last:
            self.step_s.append(row["step_s"])
        if row["step"] == self._last:
            self._profile.start()
        if row["step"] == self._last + PROFILED_STEPS:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._trace))


def measured(setting: Setting, asked: argparse.Namespace) -> dict[str, Any]:
    """A setting's kernels with their floors."""
    words = our_command(setting, 1, 1, asked.set)
    fields = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    total = asked.warmup + asked.steps + PROFILED_STEPS
    job = load_job("pretrain-1b", [*fields, f"run.steps={total}"]).job
    device = choose_device(job)
    prepare_device(job, device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        watch = Watch(asked.warmup, asked.steps, device.type == "cuda", trace)
        peak = trained(job, World(device), watch)
        launches = read_trace(trace)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rows = rows_of(launches, PROFILED_STEPS, setting.vocab_size)
    rates = measured_rates(device, DTYPES[setting.compute], {row.shape for row in rows if row.shape is not None})
    rows = with_floors(rows, rates, known_floors(setting, trained_parameters(job.model), rates))
    step_s, busy = statistics.median(watch.step_s), busy_s(launches) / PROFILED_STEPS
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "tokens_per_s": setting.tokens_per_step / step_s,
        "step_s": step_s,
        "busy_s": busy,
        "peak_memory_bytes": peak,
        "copy_bytes_per_s": rates.bytes_per_s,
        "best_flops_per_s": rates.flops_per_s,
        "groups": groups_of(rows, max(0.0, step_s - busy)),
        "rows": [{**asdict(row), "excess_s": row.excess_s} for row in rows],
    }


def trained(job: Any, world: World, watch: Watch) -> int | None:
    """Run the job's steps under the watch; returns its peak memory. Nothing of the model is left afterwards."""
    corpus = open_corpus(job)
    loader = training_loader(job, corpus, world)
    loader.start()
    choose_attention(job, world)
    engine, weights = build(job, world)
    training = make_trainer(job, corpus, engine, weights, watch, watch, world)
    peak: int | None = training.run(loader=loader).peak_memory_bytes
    return peak


def known_floors(setting: Setting, parameters: int, rates: Rates) -> dict[str, float]:
    """Floors of kernels that the profiler knows no arguments of, from the setting's sizes."""
    tokens = setting.tokens_per_step
    [attention] = [part for part in other_parts(setting, parameters) if part.group == "attention"]
    return {
        "attention": attention.flops / rates.flops_per_s,
        "optimizer": UPDATE_BYTES * parameters / rates.bytes_per_s,
        "_cross_entropy": 2 * 2 * tokens * setting.vocab_size / rates.bytes_per_s,
        "_swiglu_backward": 5 * 2 * tokens * setting.ffn_width * setting.layers / rates.bytes_per_s,
    }


def measured_rates(device: torch.device, dtype: torch.dtype, shapes: set[Shape]) -> Rates:
    """The rate of a copy, of a large product, and the best time of each shape."""
    size = 2**31 if device.type == "cuda" else 2**24
    copied = copy_s(size, device)
    best = {shape: best_product_s(shape, dtype, device) for shape in shapes}
    large = (8192, 8192, 8192) if device.type == "cuda" else (512, 512, 512)
    timed = [(large, best_product_s(large, dtype, device)), *best.items()]
    flops = max(2.0 * math.prod(shape) / seconds for shape, seconds in timed)
    return Rates(2 * size / copied, flops, best)


def copy_s(size: int, device: torch.device) -> float:
    """Seconds of a copy of random bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return seconds_of(lambda: target.copy_(source), device)


def best_product_s(shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """The shortest time of a product in any layout of its two operands."""
    rows, columns, inner = shape
    found = []
    for first_turned in (False, True):
        for second_turned in (False, True):
            first = torch.randn((inner, rows) if first_turned else (rows, inner), dtype=dtype, device=device)
            second = torch.randn((columns, inner) if second_turned else (inner, columns), dtype=dtype, device=device)
            a, b = first.t() if first_turned else first, second.t() if second_turned else second
            out = torch.empty(rows, columns, dtype=dtype, device=device)
            found.append(seconds_of(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device))
    return min(found)


def seconds_of(call: Callable[[], Any], device: torch.device, samples: int = 5) -> float:
    """Median seconds of a call: of several in a row, between two waits for the device."""

    def taken(count: int) -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(count):
            call()
        wait(device)
        return (time.perf_counter() - began) / count

    taken(1)
    count = max(1, min(50, round(4e-3 / max(taken(1), 1e-6))))
    return statistics.median(taken(count) for _ in range(samples))


def wait(device: torch.device) -> None:
    """For what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(result: dict[str, Any], count: int) -> None:
    """The two tables of a setting."""
    rows = [Row(**{name: value for name, value in row.items() if name != "excess_s"}) for row in result["rows"]]
    step, tokens = 1e3 * result["step_s"], result["tokens_per_s"]
    copy, flops = result["copy_bytes_per_s"] / 1e12, result["best_flops_per_s"] / 1e12
    floor = sum(group["floor_s"] for group in result["groups"].values())
    where = f"{result['setting']} on {result['device']}, torch {result['torch']}"
    print(f"\n{where}: {step:.1f} ms a step, {tokens:,.0f} tokens/s")
    print(f"copy {copy:.2f} TB/s, best product {flops:.0f} TFLOP/s, sum of floors {1e3 * floor:.1f} ms\n")
    print(f"{'group':24}{'ms':>9}{'floor':>9}{'excess':>9}")
    for name, group in result["groups"].items():
        seconds = (1e3 * group[kind] for kind in ("seconds", "floor_s", "excess_s"))
        print(f"{name:24}" + "".join(f"{one:9.3f}" for one in seconds))
    print(f"\n{'excess ms':>9}{'ms':>9}{'floor':>9}{'calls':>7}  kernel")
    for row in rows[:count]:
        work = 0.0 if row.shape is None else 2.0 * row.calls * math.prod(row.shape)
        rate = f"  {work / row.seconds / 1e12:.0f} TFLOP/s" if work else ""
        least = "–" if row.floor_s is None else f"{1e3 * row.floor_s:.3f}"
        times = f"{1e3 * row.excess_s:9.3f}{1e3 * row.seconds:9.3f}{least:>9}{row.calls:7.1f}"
        print(f"{times}  {row.group}: {row.name[:110]}{rate}")


if __name__ == "__main__":
    main()
