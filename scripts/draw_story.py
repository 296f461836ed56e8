"""The README's picture: plan, proof, rehearsal, run. Every number in it is from a command or a result file named below.

    python scripts/draw_story.py

plan    `meshwright plan --model llama-3-8b --cluster 8xh100 --top 5 --json`
proof   `meshwright verify demo --set layout.dp_shard=2 --set layout.tp=2 --json`
rehearse the command of docs/rehearse.md with `--json`: demo with pp 2 and dp_shard 2, a small batch, both stages
run     benchmarks/results: a loss curve on one H200, and the planner's predictions next to measurements there
"""

import json
import math
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

from meshwright.amounts import size

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "docs" / "images" / "story.svg"
SETTINGS = ("layout.pp=2", "layout.dp_shard=2", "batch.micro_batch=2", "batch.global_batch=8")
REHEARSED = [word for setting in SETTINGS for word in ("--set", setting)]
INK, QUIET, LINE, BLUE, GREEN, AMBER = "#1c2733", "#5b6b7b", "#d8dee5", "#2f6fb2", "#2f8f5b", "#c77d1e"
WIDTH, HEIGHT, PANEL = 810, 810, 380


def main() -> None:
    plan = _json("plan", "--model", "llama-3-8b", "--cluster", "8xh100", "--top", "5")
    proof = _json("verify", "demo", "--set", "layout.dp_shard=2", "--set", "layout.tp=2")
    rehearsal = _json("rehearse", "demo", *REHEARSED, "--each-stage")
    panels = [_plan(plan), _proof(proof), _rehearsal(rehearsal), _run()]
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="system-ui, '
        'sans-serif" aria-label="Plan: layouts ranked by predicted speed. Proof: a layout equals one process in '
        "float64. Rehearse: one rank of every kind, run alone. Run: the loss falls, and what was predicted is what was "
        'measured.">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="#ffffff"/>',
    ]
    for place, shape in enumerate(panels):
        across, down = (20 + step * (PANEL + 10) for step in (place % 2, place // 2))
        shapes.append(f'<g transform="translate({across} {down})">{shape}</g>')
    OUT.write_text("\n".join([*shapes, "</svg>"]) + "\n", encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size / 1e3:.0f} kB")


def _json(*words: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "meshwright", *words, "--json"], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def _head(number: int, title: str, below: str) -> str:
    return (
        f'<rect width="{PANEL}" height="{PANEL}" rx="10" fill="#f6f8fa" stroke="{LINE}"/>'
        + _text(18, 34, f"{number}  {title}", 20, INK, "600")
        + _text(18, 58, below, 13, QUIET)
    )


def _text(x: float, y: float, words: str, size: int = 12, colour: str = INK, weight: str = "400", end: str = "") -> str:
    anchor = f' text-anchor="{end}"' if end else ""
    look = f'font-size="{size}" fill="{colour}" font-weight="{weight}"{anchor}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(1.0, width):.1f}" height="{height}" rx="3" fill="{colour}"/>'


def _plan(plan: Any) -> str:
    shapes = [_head(1, "Plan", "the fastest layout that fits: llama-3-8b on 8 H100")]
    fastest = plan["layouts"][0]["tokens_per_s_per_gpu"]
    for place, row in enumerate(plan["layouts"]):
        y = 92 + place * 52
        layout, rate = row["layout"], row["tokens_per_s_per_gpu"]
        data = layout["dp_replicate"] * layout["dp_shard"]
        axes = {"dp": data, "tp": layout["tp"], "cp": layout["cp"], "pp": layout["pp"]}
        words = ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        words += f", zero {layout['zero']}, micro-batch {row['batch']['micro_batch']}, {row['memory']['recompute']}"
        shapes.append(_text(18, y, words, 12, INK))
        shapes.append(_bar(18, y + 7, 165 * rate / fastest, 14, BLUE if place == 0 else "#9db8d6"))
        told = f"{rate:,.0f} tokens/s a GPU, {row['device_bytes'] / 2**30:.0f} GiB"
        shapes.append(_text(190, y + 18, told, 11, QUIET))
    searched = (
        f"{plan['bounded']:,} layouts bounded in {1e3 * plan['bound_s']:.0f} ms, {plan['predicted']} predicted in full"
    )
    shapes.append(_text(18, 360, searched, 12, QUIET))
    return "".join(shapes)


def _proof(proof: Any) -> str:
    layout = ", ".join(f"{axis} {size}" for axis, size in proof["layout"].items())
    shapes = [_head(2, "Proof", f"{layout} on {proof['ranks']} processes = one process")]
    kinds: dict[str, list[float]] = {}
    for row in proof["rows"]:
        kinds.setdefault(row["kind"], []).append(row["error"])
    bound = proof["rows"][0]["bound"]

    def across(error: float) -> float:
        return 370 * (math.log10(max(error, 1e-17)) + 17) / 9

    for place, (kind, errors) in enumerate(list(kinds.items())[:5]):
        y = 96 + place * 48
        largest = "equal to the last bit" if max(errors) == 0 else f"largest difference {max(errors):.0e}"
        shapes.append(_text(18, y, f"{kind}: {len(errors)} compared, {largest}", 12))
        shapes.append(_bar(18, y + 7, across(max(errors)), 12, GREEN))
    limit = 18 + across(bound)
    shapes.append(f'<path d="M{limit:.1f} 82V330" stroke="{AMBER}" stroke-width="2" stroke-dasharray="5 4"/>')
    shapes.append(_text(limit + 12, 346, f"bound {bound:.0e}, float64", 11, AMBER, end="end"))
    verdict = "proven equal" if proof["equal"] else "NOT EQUAL"
    shapes.append(_text(18, 360, f"{verdict} in {proof['seconds']:.1f} s on two CPU cores", 12, QUIET))
    return "".join(shapes)


def _rehearsal(rehearsal: Any) -> str:
    where = f"one rank of each kind of {rehearsal['world']}, run alone on a {rehearsal['device']}"
    shapes = [_head(3, "Rehearse", where)]
    most = max(max(rank["memory"]["allocated_bytes"], rank["memory"]["planned_bytes"]) for rank in rehearsal["ranks"])
    for place, rank in enumerate(rehearsal["ranks"][:2]):
        y, held, planned = 92 + place * 130, rank["memory"]["allocated_bytes"], rank["memory"]["planned_bytes"]
        shapes.append(_text(18, y, f"rank {rank['rank']} of {rehearsal['world']}, {rank['place']}", 12, INK, "600"))
        for row, (name, value, colour) in enumerate((("planned", planned, "#9db8d6"), ("rehearsed", held, BLUE))):
            shapes.append(_bar(18, y + 9 + 20 * row, 200 * value / most, 14, colour))
            shapes.append(_text(24 + 200 * value / most, y + 20 + 20 * row, f"{name} {size(value)}", 11, QUIET))
        sent = sum(one["bytes"] * one["count"] for one in rank["messages"])
        number = sum(one["count"] for one in rank["messages"])
        shapes.append(_text(18, y + 66, f"{number} messages of {size(sent)} in all, counted and replaced", 12))
        shapes.append(_text(18, y + 84, f"{1e3 * rank['step_s']:,.0f} ms of compute per step, measured", 12))
    shapes.append(_text(18, 360, "before the queue: no wire, no losses, but all else", 12, QUIET))
    return "".join(shapes)


def _run() -> str:
    shapes = [_head(4, "Run", "trained, measured, and held against the plan")]
    curve = json.loads((RESULTS / "2026-11-15-precision-curve-h200.json").read_text(encoding="utf-8"))
    losses = next(row["losses"] for row in curve["results"] if row["setting"] == "curve bf16")
    low, high = min(losses), max(losses)
    points = " ".join(
        f"{18 + 340 * place / (len(losses) - 1):.1f},{180 - 90 * (loss - low) / (high - low):.1f}"
        for place, loss in enumerate(losses)
    )
    shapes.append(f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="1.6"/>')
    shapes.append(
        _text(358, 92, f"loss {high:.1f} → {losses[-1]:.1f}, {len(losses)} steps, H200", 12, QUIET, end="end")
    )
    predicted = json.loads((ROOT / "benchmarks/evidence/plan_h200_predicted.json").read_text(encoding="utf-8"))["rows"]
    rows = [json.loads(line) for line in (RESULTS / "plan_h200_measured.jsonl").read_text("utf-8").splitlines()]
    kinds = (("step time", "step_s", "step_s", AMBER), ("peak memory", "peak_bytes", "allocated_bytes", GREEN))
    for place, (name, measured, guess, colour) in enumerate(kinds):
        pairs = [(row[measured], predicted[row["name"]][guess]) for row in rows if row["state"] == "measured"]
        shapes.append(_scatter(18 + 180 * place, 206, name, pairs, colour))
    return "".join(shapes)


def _scatter(x: float, y: float, name: str, pairs: list[tuple[float, float]], colour: str) -> str:
    """Predicted over measured on logarithmic axes, with the diagonal where they are the same."""
    size = 118
    ends = [value for pair in pairs for value in pair]
    low, high = math.log(min(ends)) - 0.1, math.log(max(ends)) + 0.1
    shapes = [
        f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="#ffffff" stroke="{LINE}"/>',
        f'<path d="M{x} {y + size}L{x + size} {y}" stroke="{LINE}"/>',
    ]
    for measured, predicted in pairs:
        across, up = ((math.log(value) - low) / (high - low) * size for value in (measured, predicted))
        shapes.append(
            f'<circle cx="{x + across:.1f}" cy="{y + size - up:.1f}" r="3" fill="{colour}" fill-opacity="0.8"/>'
        )
    error = sum(abs(predicted / measured - 1) for measured, predicted in pairs) / len(pairs)
    shapes.append(_text(x, y + size + 18, f"{name}: predicted", 12))
    shapes.append(_text(x, y + size + 34, f"{error:.1%} off in {len(pairs)} jobs", 12, QUIET))
    return "".join(shapes)


if __name__ == "__main__":
    main()
