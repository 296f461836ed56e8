"""Peers side by side: this project, transformers' Trainer and torchtitan on the same shape and card, in one run.

    python benchmarks/peers/run.py [--setting NAME]… [--systems A,B] [--repeats N] [--quick] [--out FILE]

Every measurement is a separate process, and repeats are interleaved (A B C A B C …), so that a card that warms up or
slows down does so for all. Throughput is tokens over the wall time of --steps steps between two waits for the device,
after --warmup steps; ratios are of medians over repeats. README.md says what each system keeps in which format.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shapes import BALANCE_RATE, CLIP, DEFAULT, SETTINGS, Setting

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from gpu_readings import gpu_readings  # noqa: E402
from gpu_readings import said as gpu_readings_said  # noqa: E402

ROOT = HERE.parents[1]
DRIVERS = {
    "transformers": "transformers_trainer.py",
    "torchtitan": "torchtitan_train.py",
    "torchtitan-0.3": "torchtitan03_train.py",
}
SYSTEMS = ("ours", *DRIVERS)
QUICK = {"setting": ["1b-untied-mb8"], "systems": list(SYSTEMS), "repeats": 1, "warmup": 4, "steps": 8}
LIMIT_S = 600
Row = dict[str, Any]


def main() -> None:
    """Measure, print as results come, then the table."""
    asked = parse()
    names = asked.setting or list(DEFAULT)
    contestants = [(name, system) for name in names for system in asked.systems or SETTINGS[name].systems]
    rows: list[Row] = []
    for repeat in range(1, asked.repeats + 1):
        for name, system in contestants:
            if any(row["state"] == "skipped" for row in rows if row["system"] == system and row["setting"] == name):
                continue
            row = {"setting": name, "system": system, "repeat": repeat}
            packages = asked.packages.get(system)
            row |= measure(system, SETTINGS[name], asked.warmup, asked.steps, asked.set, packages)
            rows.append(row)
            print(f"{repeat} of {asked.repeats}  {name}  {system}: {said(row)}", flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(report(rows, asked), indent=1) + "\n", encoding="utf-8")
    show(report(rows, asked))
    sys.exit(any(row["state"] == "failed" for row in rows))


def parse() -> argparse.Namespace:
    """The command line; --quick changes the defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = f"{' and '.join(DEFAULT)} by default"
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help=f"may be repeated; {default}")
    parser.add_argument("--systems", type=listed, help=f"of {', '.join(SYSTEMS)}; by default those the setting names")
    parser.add_argument("--repeats", type=int, help="2 by default")
    parser.add_argument("--warmup", type=int, help="6 by default; the first steps compile")
    parser.add_argument("--steps", type=int, help="20 by default")
    parser.add_argument("--quick", action="store_true", help="every system once, untied, fewer steps")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of our own job")
    from_here = "packages of a system that come before all others, as two versions of torchtitan need it"
    parser.add_argument("--packages", action="append", default=[], metavar="SYSTEM=FOLDER", help=from_here)
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every measurement")
    asked = parser.parse_args()
    usual = QUICK if asked.quick else {"repeats": 2, "warmup": 6, "steps": 20}
    for name, value in usual.items():
        if getattr(asked, name) is None:
            setattr(asked, name, value)
    asked.packages = dict(each.split("=", 1) for each in asked.packages if "=" in each)
    if any(system not in DRIVERS for system in asked.packages):
        parser.error(f"--packages is SYSTEM=FOLDER with one of {', '.join(DRIVERS)}")
    if asked.warmup < 2 or min(asked.steps, asked.repeats) < 1:
        parser.error("--warmup must be at least 2, --steps and --repeats at least 1")
    return asked


def listed(text: str) -> list[str]:
    """Systems separated by commas."""
    names = text.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(f'"{unknown[0]}" is not one of {", ".join(SYSTEMS)}')
    return names


def measure(
    system: str, setting: Setting, warmup: int, steps: int, overrides: Sequence[str], packages: str | None = None
) -> Row:
    """One process; what it measured, or why there is nothing. A peer's `packages` are a folder that it imports from."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        environment = surroundings()
        if system == "ours":
            command = our_command(setting, warmup, steps, overrides)
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        else:
            if packages is not None:
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
            request = json.dumps({"setting": asdict(setting), "warmup": warmup, "steps": steps})
            command = [sys.executable, str(HERE / DRIVERS[system]), request, str(file)]
        try:
            with gpu_readings() as gpu:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"state": "failed", "why": f"not finished after {LIMIT_S} s"}
        if done.returncode:
            return failure(done.stderr)
        result = from_bench(json.loads(done.stdout)) if system == "ours" else json.loads(file.read_text("utf-8"))
    result["tokens_per_s"] = steps * setting.tokens_per_step / result["timed_s"]
    return {"state": "measured", **result, "gpu": gpu, "process_s": time.monotonic() - started}


def surroundings() -> dict[str, str]:
    """The same for all: one device, and an allocator that does not fragment unless configured otherwise."""
    one_device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {**allocator, **os.environ, "CUDA_VISIBLE_DEVICES": one_device}


def our_command(
    setting: Setting, warmup: int, steps: int, overrides: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """`meshwright bench` on the recipe for this shape, with the setting's numbers."""
    fields = {
        **{f"model.{name}": getattr(setting, name) for name in ("layers", "width", "heads", "kv_heads", "ffn_width")},
        "model.head_dim": setting.head_dim or setting.width // setting.heads,
        "model.vocab_size": setting.vocab_size,
        "model.tied": setting.tied,
        "batch.sequence_length": setting.sequence_length,
        "batch.micro_batch": setting.micro_batch,
        "batch.global_batch": setting.micro_batch,
        "memory.recompute": setting.recompute,
        "precision.compute": setting.compute,
        "optimizer.clip": CLIP,
        "run.compile": setting.compile,
        "run.device": setting.device,
    }
    if setting.experts:
        fields |= {
            "model.experts.count": setting.experts,
            "model.experts.top_k": setting.top_k,
            "model.experts.ffn_width": setting.ffn_width,
            "model.experts.force_balance": setting.forced_balance,
            "model.experts.balance_rate": BALANCE_RATE,
            "model.qk_norm": True,
        }
    words = [f"{name}={json.dumps(value)}" for name, value in fields.items()]
    sets = [word for each in (*words, *setting.ours, *overrides) for word in ("--set", each)]
    command = [sys.executable, "-m", "meshwright", "bench", "pretrain-1b", *sets]
    return [*command, "--steps", str(steps), "--warmup", str(warmup), "--json", *options]


def from_bench(bench: Row) -> Row:
    """The part of our command's result that peers report too."""
    return {
        "timed_s": bench["timed_s"],
        "median_step_s": bench["step_s"]["median"],
        "first_step_s": bench["first_step_s"],
        "peak_memory_bytes": bench["peak_memory_bytes"] if bench["device"] != "CPU" else None,
        "parameters": bench["parameters"],
        "loss": statistics.mean(bench["losses"]),
        "device": bench["device"],
        "versions": {"torch": bench["torch"]},
    }


def failure(errors: str) -> Row:
    """Why a process ended without a result, from the end of its output."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["it printed nothing"]
    why = ([line for line in lines if "Error" in line] or lines)[-1]  # warnings may follow the error
    if "OutOfMemoryError" in errors or "ran out of memory" in errors:
        return {"state": "out of memory", "why": why}
    if why.startswith(("ModuleNotFoundError: ", "ImportError: ", "skipped: ")):
        return {"state": "skipped", "why": why.partition(": ")[2]}
    return {"state": "failed", "why": why}


def report(rows: Sequence[Row], asked: argparse.Namespace) -> Row:
    """All rows, and for each setting its medians and our ratio to each peer."""
    how = f"tokens / wall time of {asked.steps} steps between two waits for the device, after {asked.warmup}; "
    how += f"repeats: {asked.repeats}, interleaved, a process each; medians"
    settings = {}
    for name in dict.fromkeys(row["setting"] for row in rows):
        here = [row for row in rows if row["setting"] == name]
        systems = {each: summary([row for row in here if row["system"] == each]) for each in SYSTEMS}
        systems = {each: found for each, found in systems.items() if found}
        settings[name] = {"shape": asdict(SETTINGS[name]), "systems": systems, **ratios(systems)}
    return {"how": how, "our_overrides": asked.set, "settings": settings, "rows": list(rows)}


def summary(rows: Sequence[Row]) -> Row:
    """One system under one setting; empty where it was not tried."""
    measured = [row for row in rows if row["state"] == "measured"]
    if not measured:
        return {key: rows[-1][key] for key in ("state", "why")} if rows else {}
    values = [row["tokens_per_s"] for row in measured]
    peaks = [row["peak_memory_bytes"] for row in measured if row["peak_memory_bytes"] is not None]
    return {
        "state": "measured",
        "device": measured[-1]["device"],
        "tokens_per_s": statistics.median(values),
        "all_tokens_per_s": values,
        "median_step_s": statistics.median(median_step(row) for row in measured),
        "peak_memory_bytes": max(peaks, default=None),
        "parameters": measured[-1]["parameters"],
        "loss": measured[-1]["loss"],
        "gpu": measured[-1]["gpu"],
        "formats": measured[-1].get("formats"),
        "versions": measured[-1]["versions"],
    }


def median_step(row: Row) -> float:
    """Of the timed steps."""
    return float(row["median_step_s"] if "median_step_s" in row else statistics.median(row["step_s"]))


def ratios(systems: dict[str, Row]) -> Row:
    """Our medians over each peer's; a peer with another number of parameters ran another model and gets none."""
    found: Row = {"throughput_ratio": {}, "memory_ratio": {}, "another_model": []}
    measured = {name: each for name, each in systems.items() if each["state"] == "measured"}
    ours = measured.pop("ours", None)
    for name, peer in measured.items() if ours else ():
        if ours["parameters"] != peer["parameters"]:
            found["another_model"].append(name)
            continue
        found["throughput_ratio"][name] = ours["tokens_per_s"] / peer["tokens_per_s"]
        if ours["peak_memory_bytes"] and peer["peak_memory_bytes"]:
            found["memory_ratio"][name] = ours["peak_memory_bytes"] / peer["peak_memory_bytes"]
    return found


def said(row: Row) -> str:
    """One measurement in a line."""
    if row["state"] != "measured":
        return f"{row['state']} ({row['why']})"
    rate, peak = f"{row['tokens_per_s']:,.0f} tokens/s", f"peak {gib(row['peak_memory_bytes'])}"
    return f"{rate}, {peak}{gpu_readings_said(row['gpu'])}, {row['process_s']:.0f} s in all"


def show(found: Row) -> None:
    """The table, with every value behind a median."""
    print(f"\n{found['how']}")
    for name, setting in found["settings"].items():
        devices = {each["device"] for each in setting["systems"].values() if each["state"] == "measured"}
        print(f"\n{name} on {' and '.join(devices) or 'no device'}")
        for system, each in setting["systems"].items():
            if each["state"] != "measured":
                print(f"  {system:13}{each['state']}: {each['why']}")
                continue
            values = " ".join(f"{value:,.0f}" for value in each["all_tokens_per_s"])
            line = f"  {system:13}{each['tokens_per_s']:>9,.0f} tokens/s ({values})"
            line += f"  step {1e3 * each['median_step_s']:.1f} ms  peak {gib(each['peak_memory_bytes'])}"
            line += gpu_readings_said(each["gpu"])
            print(f"{line}  {each['parameters']:,} parameters  loss {each['loss']:.2f}  {versions(each)}")
        for system, ratio in setting["throughput_ratio"].items():
            memory = setting["memory_ratio"].get(system)
            beside = "" if memory is None else f", with {memory:.2f} × its peak memory"
            print(f"  ours is {ratio:.3f} × {system}{beside}")
        for system in setting["another_model"]:
            print(f"  no ratio to {system}: its number of parameters differs from ours")


def versions(system: Row) -> str:
    """Of the packages that ran."""
    return ", ".join(f"{name} {version}" for name, version in system["versions"].items())


def gib(size: int | None) -> str:
    """Bytes in readable form; unknown on a CPU."""
    return "–" if size is None else f"{size / 2**30:.1f} GiB"


if __name__ == "__main__":
    main()
