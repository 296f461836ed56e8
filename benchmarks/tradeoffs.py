"""What each way of saving memory costs in time and vice versa: one change at a time, against one base.

    python benchmarks/tradeoffs.py [--device cpu|cuda] [--out FILE] [--only TEXT] [--seconds S]

Every setting is a job with synthetic tokens, run by the real training loop without saving anything; steps run
until the time of a setting is over, three at least. Speed is the median of tokens/s over steps after the first; on
CUDA every step ends with a device synchronisation.

CUDA: Llama-3.2-1B's blocks (8 of its 16, a vocabulary of 32,768), S 2048, bf16, 4 sequences a micro-batch, 2 of these
a step, eager; all settings in one process, one after another; memory is the allocator's peak in steps
after the first, less what was allocated before the model was built.

CPU: a model of 3.9 million parameters, S 64, fp32, on all cores; each setting is a separate process, and its memory
is the peak of its resident set minus what was resident before the model was built. Two ranks take a core each, are
compared with two ranks that share nothing, and the larger of their two memories counts.

"same" is within 2% of the base. The base is measured a second time at the end: how far that row is from 1 is how much
the machine itself varied.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAME = 0.02
TOO_SLOW = 20
"""Formats whose products take this many times longer than fp32's are not worth waiting for."""
MIB = 2**20
Sections = dict[str, dict[str, Any]]

CUDA_BASE: Sections = {
    "model": {
        "vocab_size": 32768, "width": 2048, "layers": 8, "heads": 32, "kv_heads": 8, "head_dim": 64,
        "ffn_width": 8192, "max_sequence_length": 2048, "tied": True,
    },
    "batch": {"sequence_length": 2048, "global_batch": 8, "micro_batch": 4},
    "precision": {"compute": "bf16"},
    "run": {"device": "cuda"},
}  # fmt: skip
CPU_BASE: Sections = {
    "model": {
        "vocab_size": 2048, "width": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn_width": 768,
        "max_sequence_length": 64,
    },
    "batch": {"sequence_length": 64, "global_batch": 8, "micro_batch": 4},
    "precision": {"compute": "fp32"},
    "run": {"device": "cpu"},
}  # fmt: skip
COMMON: Sections = {
    "data": {"sources": ["builtin:synthetic"]},
    "optimizer": {"lr": 1e-4},
    "schedule": {"warmup_steps": 1},
    "evaluation": {"every_steps": 0},
    "run": {"steps": 1000, "on_bad_step": "keep"},
}


@dataclass(frozen=True)
class Setting:
    """One change of the base."""

    technique: str
    change: str
    sections: Sections = field(default_factory=dict)
    only: str | None = None
    """The one kind of device where it can be measured."""
    against: str = "base"
    """The change it is compared with."""
    why_not: str = ""
    """The note where it cannot be measured."""


def settings(device: str) -> list[Setting]:
    """All changes, the base first and last."""
    micro_batch, global_batch = (CUDA_BASE if device == "cuda" else CPU_BASE)["batch"]["micro_batch"], 8
    two, one_gpu = "2 ranks, nothing shared", "not measurable on one GPU"
    found = [
        Setting("base", "base"),
        Setting("accumulation", "twice the micro-batches, half as large", {"batch": {"micro_batch": micro_batch // 2}}),
        Setting("accumulation", "none: one micro-batch, twice as large", {"batch": {"micro_batch": 2 * micro_batch}}),
        *(
            Setting(
                "batch size",
                f"{word} the sequences, same accumulation",
                {"batch": {"micro_batch": int(micro_batch * factor), "global_batch": int(global_batch * factor)}},
            )
            for word, factor in (("twice", 2), ("half", 0.5))
        ),
        *(Setting("recompute", how, {"memory": {"recompute": how}}) for how in ("selective", "full")),
        *(
            Setting("precision", f"compute in {compute}", {"precision": {"compute": compute}})
            for compute in (("fp32", "tf32", "fp16", "fp8") if device == "cuda" else ("bf16", "fp16"))
        ),
        Setting("precision", "gradients in bf16", {"precision": {"compute": "bf16", "gradients": "bf16"}}, "cuda"),
        *(
            Setting("precision", f"optimizer states in {states}", {"precision": {"optimizer_states": states}})
            for states in ("bf16", "int8")
        ),
        *(
            Setting("optimizer", f"{name} instead of adamw", {"optimizer": {"name": name}})
            for name in ("sgd", "lion", "adafactor", "muon")
        ),
        Setting("loader", "no workers instead of 2", {"data": {"workers": 0}}),
        Setting("sharded optimizer", two, {"layout": {"dp_replicate": 2}}, "cpu", why_not=one_gpu),
        Setting("sharded optimizer", "2 ranks, zero 1", {"layout": {"dp_shard": 2, "zero": 1}}, "cpu", two, one_gpu),
        Setting("offload", "optimizer", {"memory": {"offload": ["optimizer"]}}),
        Setting("offload", "activations", {"memory": {"offload": ["activations"]}}),
        Setting("base", "base again"),
    ]
    return [setting for setting in found if setting.only in (None, device) or setting.why_not]


def make_job(device: str, setting: Setting) -> Any:
    """The base with one change."""
    from meshwright.job import Job

    merged: Sections = {}
    for sections in (COMMON, CUDA_BASE if device == "cuda" else CPU_BASE, setting.sections):
        for name, fields in sections.items():
            merged[name] = {**merged.get(name, {}), **fields}
    return Job.model_validate(merged)


class Speeds:
    """Recorder and progress that keep each step's speed."""

    def __init__(self) -> None:
        self.tokens_per_s: list[float] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.tokens_per_s.append(row["tokens_per_s"])

    def ignore(self, *args: Any, **kwargs: Any) -> None:
        """Not measured."""

    event = sample = step = evaluation = message = ignore


def train(job: Any, seconds: float) -> dict[str, Any]:
    """Build and train on this rank until the time is up; speed and memory."""
    import torch

    from meshwright.data import prepare
    from meshwright.parallel import build, join_world
    from meshwright.train import choose_device, make_trainer, prepare_device

    device = choose_device(job)
    prepare_device(job, device)
    world = join_world(job, device)
    corpus = prepare(job.data, job.model.vocab_size, lambda stage, share: None)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident_bytes("VmHWM")
    engine, weights = build(job, world)
    speeds = Speeds()
    started = time.monotonic()

    def over() -> bool:
        return len(speeds.tokens_per_s) >= 2 and time.monotonic() - started > seconds

    outcome = make_trainer(job, corpus, engine, weights, speeds, speeds, world).run(over)
    peak, steady = resident_bytes("VmHWM"), None
    if device.type == "cuda":
        assert outcome.peak_memory_bytes is not None and outcome.steady_memory_bytes is not None
        peak, steady = outcome.peak_memory_bytes, outcome.steady_memory_bytes - before
        torch.cuda.synchronize()
    return {
        "tokens_per_s": statistics.median(speeds.tokens_per_s[1:]),
        "steps": len(speeds.tokens_per_s),
        "peak_bytes": peak - before,
        "steady_bytes": steady,
    }


def slowness(compute: str) -> float:
    """How many times longer a matrix product takes in a format than in fp32; CPUs without its arithmetic emulate it."""
    import torch

    from meshwright.model.numbers import DTYPES

    taken_s = []
    for dtype in (torch.float32, DTYPES[compute]):
        matrix = torch.zeros(128, 128, dtype=dtype)
        matrix @ matrix
        started = time.process_time()
        for _ in range(3):
            matrix @ matrix
        taken_s.append(time.process_time() - started)
    return taken_s[1] / taken_s[0]


def resident_bytes(field_name: str) -> int:
    """A line of this process's status, which is in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field_name}:"))


def measure_here(device: str, setting: Setting, seconds: float) -> dict[str, Any]:
    """One setting in this process, or in ranks forked from it; reports settings that were refused or ran out of
    memory."""
    import torch

    from meshwright.errors import UserError
    from meshwright.layout import ranks_of, require_layout
    from meshwright.verify import run_ranks

    try:
        job = make_job(device, setting)
        ranks = ranks_of(job.layout)
        require_layout(job, ranks)
        if device == "cpu" and (times := slowness(job.precision.compute)) > TOO_SLOW:
            return {"failed": f"not measured: a product takes {times:.0f} times as long as in fp32 on this CPU"}
        if ranks == 1:
            return train(job, seconds)
        of_ranks = run_ranks(train, ranks, job, seconds)
        return {**of_ranks[0], "peak_bytes": max(one["peak_bytes"] for one in of_ranks)}
    except UserError as error:
        return {"failed": f"refused: {error}"}
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"}


def measure_in_child(setting: Setting, seconds: float) -> dict[str, Any]:
    """One setting in its own process on the CPU."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", setting.change, "--seconds", str(seconds)]
    # Ranks are forked, and OpenMP's threads do not survive that: a process that will have ranks must never start any.
    threads = 1 if "layout" in setting.sections else len(os.sched_getaffinity(0))
    limit_s = 20 * seconds
    try:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"three steps took more than {limit_s:.0f} s"}
    if done.returncode:
        return {"failed": f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(device: str, setting: Setting, seconds: float) -> dict[str, Any]:
    """A setting's row: what was measured, or why it was not."""
    row = {"technique": setting.technique, "change": setting.change, "against": setting.against}
    if setting.only not in (None, device):
        return {**row, "failed": setting.why_not}
    if device == "cpu":
        return {**row, **measure_in_child(setting, seconds)}
    import torch

    measured = measure_here(device, setting, seconds)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {**row, **measured}


def compare(rows: list[dict[str, Any]]) -> None:
    """Add ratios and verdicts to rows whose reference was measured."""
    measured = {row["change"]: row for row in rows if "failed" not in row}
    for row in measured.values():
        reference = measured.get(row["against"])
        if reference is None:
            continue
        speed = row["tokens_per_s"] / reference["tokens_per_s"]
        memory = row["peak_bytes"] / reference["peak_bytes"]
        row |= {"speed_ratio": round(speed, 3), "memory_ratio": round(memory, 3)}
        row["faster"] = _verdict(speed, "faster", "slower")
        row["smaller"] = _verdict(memory, "larger", "smaller")


def _verdict(ratio: float, above: str, below: str) -> str:
    if abs(ratio - 1) <= SAME:
        return "same"
    return above if ratio > 1 else below


def table(rows: list[dict[str, Any]]) -> str:
    """All rows as one table."""
    head = (
        f"{'technique':18} {'change':42} {'tokens/s':>9} {'ratio':>6} {'peak MiB':>9} {'ratio':>6}  faster?  smaller?"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        start = f"{row['technique']:18} {row['change']:42}"
        if "failed" in row:
            lines.append(f"{start} {row['failed']}")
            continue
        speed, memory = row.get("speed_ratio", float("nan")), row.get("memory_ratio", float("nan"))
        lines.append(
            f"{start} {row['tokens_per_s']:9,.0f} {speed:6.2f} {row['peak_bytes'] / MIB:9,.0f} {memory:6.2f}  "
            f"{row.get('faster', ''):8} {row.get('smaller', '')}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="settings whose technique or change contains this, and the base")
    parser.add_argument("--seconds", type=float, help="steps of one setting")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        [setting] = [each for each in settings("cpu") if each.change == arguments.one]
        print(json.dumps(measure_here("cpu", setting, arguments.seconds)))
        return
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    seconds = arguments.seconds or (2.5 if device == "cuda" else 3.0)
    print(__doc__)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    for setting in settings(device):
        wanted = arguments.only is None or arguments.only in f"{setting.technique} {setting.change}"
        if wanted or setting.technique == "base":
            print(f"{setting.technique}, {setting.change} …", file=sys.stderr, flush=True)
            rows.append(measure(device, setting, seconds))
    compare(rows)
    print(table(rows))
    took_s = round(time.monotonic() - started, 1)
    print(f"{took_s} s in all")
    if arguments.out:
        name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {len(os.sched_getaffinity(0))} cores"
        facts = {"date": time.strftime("%Y-%m-%d"), "device": name, "torch": torch.__version__, "seconds": took_s}
        base = CUDA_BASE if device == "cuda" else CPU_BASE
        arguments.out.write_text(json.dumps({**facts, "base": base, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
