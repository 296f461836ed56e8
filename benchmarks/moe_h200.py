"""Mixtures of experts on one GPU: OLMoE's shape in 8 and 16 layers, Qwen3-30B-A3B's in 6, a dense one as active.

    python benchmarks/moe_h200.py ours  [--out FILE]     # learned and forced routing, kernels, the dense model
    python benchmarks/moe_h200.py peers [--out FILE]     # ours and the peers in turn on the same card
    python benchmarks/moe_h200.py ours --tiny            # the same on a CPU in seconds: shows that the script runs

S 4096, bf16 compute with fp32 masters, AdamW, clipping, compiled, accumulation 1, random tokens. Ours is `meshwright
bench`, a process per line: tokens over the wall time of --steps steps after --warmup, between two waits for the device.
"forced" lines deal tokens to the experts in turn, whatever the router says; the others use the router's choice,
balanced without a loss at torchtitan's default rate. MFU counts the FLOPs of what a token uses, 6·P_matmul + 12·L·S·A,
against 989.4 TFLOP/s. Kernels are torch's profiler's over two further steps; beside them stands the floor of
moe_floor.py. Peers are measured by benchmarks/peers (see its README.md): torchtitan's Qwen3-MoE code compiled,
transformers' Qwen3-MoE eager, each in the same shape. No process is started after --seconds.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import run
from moe_floor import parameters_of, step_seconds
from run import from_bench, measure, our_command, said, surroundings
from shapes import SETTINGS, Setting

HERE = Path(__file__).parent
Row = dict[str, Any]
OLMOE = SETTINGS["olmoe-mb8"]
DENSE = replace(OLMOE, experts=0, top_k=0, ffn_width=OLMOE.top_k * OLMOE.ffn_width)
OURS: dict[str, tuple[Setting, bool]] = {
    "OLMoE 8 layers, micro-batch 4, learned": (SETTINGS["olmoe-mb4"], True),
    "OLMoE 8 layers, micro-batch 8, learned": (SETTINGS["olmoe-mb8"], True),
    "dense, same active size, micro-batch 8": (DENSE, True),
    "OLMoE 8 layers, micro-batch 8, forced": (SETTINGS["olmoe-mb8-forced"], False),
    "Qwen3-30B-A3B 6 layers, micro-batch 4, learned": (SETTINGS["qwen3-30b-a3b-mb4"], True),
    "OLMoE whole, 16 layers, micro-batch 2, learned": (replace(OLMOE, layers=16, micro_batch=2), False),
    "dense, same active size, micro-batch 4": (replace(DENSE, micro_batch=4), False),
    "OLMoE 8 layers, micro-batch 4, forced": (SETTINGS["olmoe-mb4-forced"], False),
    "Qwen3-30B-A3B 6 layers, micro-batch 8, learned": (replace(SETTINGS["qwen3-30b-a3b-mb4"], micro_batch=8), False),
}
"""Our lines by importance, and whether their kernels are shown."""
PEERS = [
    *[("olmoe-mb4", system) for system in ("ours", "torchtitan")],
    *[("olmoe-mb8-forced", system) for system in ("torchtitan", "ours")],
    *[("olmoe-mb4", system) for system in ("transformers", "torchtitan", "ours")],
    *[("qwen3-30b-a3b-mb4", system) for system in ("ours", "torchtitan")],
    *[("olmoe-mb8", system) for system in ("torchtitan", "ours")],
]
TINY = SETTINGS["tiny-mixture"]
GROUPS = {
    "experts' products": ("groupproblemshape", "_grouped_mm"),
    "attention": ("attention", "flash", "fmha", "cudnn_generated", "sdpa"),
    "other products": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "aten::mm", "aten::addmm"),
    "swiglu": ("_weighted_swiglu",),
    "rows": ("_gather_rows", "_sum_rows"),
    "routing": ("sort", "index", "scatter", "scan", "radix"),
    "loss": ("_cross_entropy",),
    "optimizer": ("adamw", "multi_tensor", "lpnorm"),
    "elementwise": ("triton_", "elementwise", "reduce_kernel", "memcpy", "memset"),
}
"""Parts of kernels' names; the first group with one wins, in lower case."""
TOP = 15
LIMIT_S = 200
"""A process that takes longer has hung."""


def main() -> None:
    """Measure, print as results come, write after every one."""
    asked = parse()
    run.LIMIT_S = LIMIT_S
    print(__doc__)
    began, rows = time.monotonic(), []
    for name, taken in lines(asked):
        if time.monotonic() - began > asked.seconds:
            print(f"{name}: no time left", flush=True)
            continue
        row = {"line": name, **taken()}
        rows.append(row)
        print(f"{name}: {shown(row)}", flush=True)
        asked.out.write_text(json.dumps(report(asked, rows), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for row in rows:
        show_kernels(row)
    for sentence in report(asked, rows)["compared"]:
        print(sentence)
    sys.exit(any(row["state"] == "failed" for row in rows))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["ours", "peers"])
    parser.add_argument("--only", help="lines whose name contains this")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480.0, help="no process is started later than this")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on a CPU instead")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of our own job")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out is None:
        name = "moe_h200.json" if asked.part == "ours" else "moe_h200_peers.json"
        asked.out = Path("/dev/null") if asked.tiny else HERE / "results" / name
    return asked


def lines(asked: argparse.Namespace) -> list[tuple[str, Any]]:
    """The lines to measure, and what measures each."""
    if asked.part == "ours":
        chosen = OURS
        if asked.tiny:
            chosen = {
                "tiny, learned": (TINY, True),
                "tiny, forced": (replace(TINY, forced_balance=True), True),
                "tiny, dense": (replace(TINY, experts=0, top_k=0, ffn_width=64), True),
            }
        found = [(name, lambda each=each: ours(asked, *each)) for name, each in chosen.items()]
    else:
        pairs = [("tiny-mixture", system) for system in ("ours", "transformers", "torchtitan")] if asked.tiny else PEERS
        found = [
            (
                f"{setting}, {system}",
                lambda setting=setting, system=system: {
                    "setting": setting,
                    "system": system,
                    **measure(system, SETTINGS[setting], asked.warmup, asked.steps, asked.set),
                },
            )
            for setting, system in pairs
        ]
    return [(name, taken) for name, taken in found if not asked.only or asked.only in name]


def ours(asked: argparse.Namespace, setting: Setting, profiled: bool) -> Row:
    """One process of ours, with its kernels if asked for."""
    norms = [] if setting.experts else ["model.qk_norm=true"]  # the same attention in the dense model
    options = ["--profile"] if profiled else []
    command = our_command(setting, asked.warmup, asked.steps, [*norms, *asked.set], options)
    environment = {**surroundings(), "PYTHONPATH": f"{HERE.parent}:{surroundings().get('PYTHONPATH', '')}"}
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"state": "failed", "why": f"not finished after {LIMIT_S} s"}
    if done.returncode:
        return {"state": "failed", "why": done.stderr[-1500:]}
    bench = json.loads(done.stdout)
    row = {
        "state": "measured",
        **from_bench(bench),
        "tokens_per_s": asked.steps * setting.tokens_per_step / bench["timed_s"],
        "mfu_active": bench["mfu"],
        "phases_s": bench["phases_s"],
        "attention": bench["attention"],
        "first_step_s": bench["first_step_s"],
        "process_s": time.monotonic() - began,
    }
    if setting.experts:
        assert abs(parameters_of(setting) / row["parameters"] - 1) < 1e-2, "moe_floor.py counts another model"
        row["floor_s"] = step_seconds(setting)
    if bench["kernels"] is not None:
        row["kernels"] = grouped(bench["kernels"])
    return row


def grouped(kernels: Row) -> Row:
    """Seconds of a step by group, and the longest kernels."""
    total = sum(kernels["kinds_s"].values())
    groups = dict.fromkeys([*GROUPS, "other"], 0.0)
    for kernel in kernels["top"]:
        groups[group_of(kernel["name"])] += kernel["seconds"]
    groups["other"] += total - sum(groups.values())  # what is not among the longest
    top = [
        {**kernel, "name": kernel["name"][:160], "group": group_of(kernel["name"]), "share": kernel["seconds"] / total}
        for kernel in kernels["top"][:TOP]
    ]
    return {"total_s": total, "groups_s": groups, "top": top}


def group_of(name: str) -> str:
    """The group of a kernel."""
    lowered = name.lower()
    return next((group for group, parts in GROUPS.items() if any(part in lowered for part in parts)), "other")


def report(asked: argparse.Namespace, rows: list[Row]) -> Row:
    """All rows, and what they say about each other."""
    import torch

    measured = {row["line"]: row for row in rows if row["state"] == "measured"}
    said_of_them = against_dense(measured) if asked.part == "ours" else against_peers(rows)
    facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "steps": asked.steps, "how": __doc__}
    return {**facts, "our_overrides": asked.set, "compared": said_of_them, "rows": rows}


def against_dense(measured: dict[str, Row]) -> list[str]:
    """MFU of active FLOPs over the dense model's at the same micro-batch."""
    found = []
    for name, row in measured.items():
        dense = measured.get(f"dense, same active size, {name.split(', ')[1]}") if name.startswith("OLMoE") else None
        if dense and dense["mfu_active"]:
            ratio = row["mfu_active"] / dense["mfu_active"]
            found.append(
                f"{name}: MFU {row['mfu_active']:.1%}, {ratio:.1%} of the dense model's {dense['mfu_active']:.1%}"
            )
    return found


def against_peers(rows: list[Row]) -> list[str]:
    """Our mean over each peer's, setting by setting."""
    found = []
    values: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["state"] == "measured":
            values.setdefault((row["setting"], row["system"]), []).append(row["tokens_per_s"])
    for (setting, system), theirs in values.items():
        if system != "ours" and (setting, "ours") in values:
            own = values[setting, "ours"]
            ratio = sum(own) / len(own) / (sum(theirs) / len(theirs))
            found.append(f"{setting}: ours is {ratio:.3f} × {system} ({_all(own)} against {_all(theirs)} tokens/s)")
    return found


def _all(values: list[float]) -> str:
    return ", ".join(f"{value:,.0f}" for value in values)


def shown(row: Row) -> str:
    """One line's result."""
    mfu = row.get("mfu_active")
    return said(row) + ("" if mfu is None else f", MFU of active FLOPs {mfu:.1%}")


def show_kernels(row: Row) -> None:
    """The groups beside their floors, and the longest kernels."""
    if "kernels" not in row:
        return
    kernels, floor = row["kernels"], row.get("floor_s", {})
    print(f"\n{row['line']}: {1e3 * kernels['total_s']:.1f} ms of kernels a step")
    for group, seconds in kernels["groups_s"].items():
        least = f", floor {1e3 * floor[group]:.1f}" if group in floor else ""
        print(f"  {group:18} {1e3 * seconds:8.2f} ms  {seconds / kernels['total_s']:5.1%}{least}")
    for kernel in kernels["top"]:
        each = f"{1e3 * kernel['seconds']:8.2f} ms {kernel['share']:5.1%} {kernel['calls']:6.0f} ×"
        print(f"    {each}  {kernel['group']:17} {kernel['name'][:110]}")


if __name__ == "__main__":
    main()
