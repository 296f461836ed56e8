"""Published runs of clusters, rehearsed on one GPU: published, planned and rehearsed time of a step.

    python benchmarks/rehearse_published.py [--only TEXT] [--seconds S] [--out FILE]
    python benchmarks/rehearse_published.py --small     # the first rows' layouts of tiny models on a CPU: no step, only
                                                        # shows that the script runs

Rows of evidence/published_runs.csv are read as `plan --validate` reads them. One rank of every kind (--each-stage) is
run here at full size, compiled where the published run was, without a checkpoint; a step has at most two micro-batches
(two per stage of a pipeline), and its forwards and backwards count as often as in the published step. Compute is scaled
to the published GPU by the planner's rates of both GPUs, with the shares of products, attention and other kernels
profiled here. The wire is the planner's.

What is rehearsed is our own program, which differs from the published one in kernels and in what it recomputes. So
the rehearsed step is given twice: as ours would take on that cluster, and times the planner's ratio of that program to
ours ("as theirs"), which is what the published time is compared with. "planned" is the plan for their program alone.

--out gets one JSON line per run as soon as it is measured. No run is begun after --seconds.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.job import Job, model_preset
from meshwright.job.data import Data
from meshwright.plan import predict, spelled
from meshwright.plan.rows import Case, case_of, read_rows
from meshwright.rehearse import Rehearsal, RehearsedRank, compose
from meshwright.rehearse.apart import RehearsalFailed
from meshwright.rehearse.run import rehearse

HERE = Path(__file__).parent
EVIDENCE = HERE / "evidence" / "published_runs.csv"
GOAL = 0.08
ROWS = {
    "titan-002": "torchtitan, Llama-3.1-8B on 8 H100 of 500 W, compiled",
    "titan-005": "the same on 128",
    "titan-038": "torchtitan, Llama-3-8B on 64 A100",
    "titan-034": "torchtitan, Llama-2-13B on 64 A100",
    "nanotron-015": "nanotron, 8.9B on 64 H100, two stages",
    "titan-036": "torchtitan, Llama-2-70B on 64 A100",
    "titan-031": "torchtitan, Llama-3.1-8B on 32 H200 in fp8, compiled",
    "titan-020": "torchtitan, Llama-3-70B on 256 H100 of 500 W, tensor parallel, compiled",
}
"""Runs whose layouts are complete, by importance and then by time."""
SYNTHETIC = Data(sources=("builtin:synthetic",))
PASSES = ("forward", "loss", "backward", "forward and backward")


@dataclass(frozen=True)
class Run:
    """A published run, and the shorter step that is rehearsed for it."""

    case: Case
    job: Job
    """As published, compiled if that was."""
    short: Job
    repeated: float
    """How many times the short step's forwards and backwards are in the published one."""


def main() -> None:
    """Rehearse every run, print and write as results come, then the errors."""
    asked = parse()
    print(__doc__)
    began, rows = time.monotonic(), list[dict[str, Any]]()
    for name, run in runs(asked.only).items():
        if time.monotonic() - began > asked.seconds:
            print(f"{name}: no time left", flush=True)
            continue
        started = time.monotonic()
        row: dict[str, Any] = {"id": name, "run": ROWS[name], "cluster": spelled(run.case.cluster)}
        try:
            found = rehearsed(small(run) if asked.small else run.short, asked)
            row |= {"state": found.ranks[0].state} if asked.small else compared(run, found)
            row |= {"device": found.device, "torch": found.torch}
        except (UserError, RehearsalFailed) as error:
            row |= {"state": "failed", "why": f"{error} {getattr(error, 'traceback', '')[-1500:]}".strip()}
        rows.append({**row, "wall_s": round(time.monotonic() - started, 1)})
        print(shown(rows[-1]), flush=True)
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**rows[-1], "how": " ".join((__doc__ or "").split())}, ensure_ascii=False) + "\n")
    for sentence in errors(rows):
        print(sentence)


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose id or description contains this")
    parser.add_argument("--seconds", type=float, default=380.0)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of every rank, after two others")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "rehearse_published.jsonl")
    return parser.parse_args()


def runs(only: str = "") -> dict[str, Run]:
    """The runs whose id or description contains this, in order."""
    kind, published = read_rows(EVIDENCE)
    by_id = {row["id"]: row for row in published}
    found = {}
    for name, words in ROWS.items():
        if only not in name and only not in words:
            continue
        case = case_of(kind, by_id[name])
        compiled = case.job.run.model_copy(update={"compile": by_id[name]["compile"] == "yes"})
        job = case.job.model_copy(update={"run": compiled, "data": SYNTHETIC})
        found[name] = Run(case, job, *shortened(job))
    return found


def shortened(job: Job) -> tuple[Job, float]:
    """The job with fewer micro-batches per step, and how many times as many there were."""
    few = min(job.accumulation, 2 * job.layout.pp)
    sequences = job.batch.global_batch // job.accumulation * few
    batch = job.batch.model_copy(update={"global_batch": sequences})
    return job.model_copy(update={"batch": batch}), job.accumulation / few


def small(run: Run) -> Job:
    """The same axes of a tiny model, two ranks each."""
    layout = run.short.layout.model_dump(exclude_unset=True) | {"split": None}
    layout |= {name: min(layout[name], 2) for name in ("dp_shard", "dp_replicate", "tp", "cp", "pp") if name in layout}
    batch = {"sequence_length": 64, "micro_batch": 1}
    batch["global_batch"] = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1) * 2 * layout.get("pp", 1)
    sections = {
        "model": {**model_preset("tiny-llama"), "layers": 4},
        "layout": layout,
        "batch": batch,
        "data": SYNTHETIC,
        "memory": {"recompute": run.short.memory.recompute},
        "run": {"device": "cpu", "steps": 10},
    }
    return Job.model_validate(sections)


def rehearsed(job: Job, asked: argparse.Namespace) -> Rehearsal:
    """One rank of every kind, on the device that is here and with all of its memory."""
    return rehearse(job, each_stage=True, steps=asked.steps, profile=not asked.small, checkpoint=False)


def compared(run: Run, found: Rehearsal) -> dict[str, Any]:
    """The published step next to the planned and the rehearsed one."""
    case = run.case
    assert case.step_s is not None
    ranks = [repeated(rank, run.repeated) for rank in found.ranks]
    step, warnings = compose(run.job, case.cluster, ranks, found.device)
    theirs, ours = predict(case.job, case.cluster, case.software).step_s, predict(run.job, case.cluster).step_s
    row: dict[str, Any] = {
        "published_s": case.step_s,
        "planned_s": theirs,
        "planned_error": theirs / case.step_s - 1,
        "planned_as_ours_s": ours,
        "ranks": [measurements(rank) for rank in found.ranks],
        "repeated": run.repeated,
        "assumed": case.assumed,
        "warnings": (*found.warnings, *warnings),
    }
    if step is None:
        return {**row, "state": "no step", "why": "; ".join(warnings)}
    as_theirs = step.step_s * theirs / ours
    return {
        **row,
        "state": "measured",
        "rehearsed_s": step.step_s,
        "rehearsed_measured_s": step.measured_s,
        "rehearsed_modelled_s": step.modelled_s,
        "rehearsed_against_plan": step.step_s / ours - 1,
        "rehearsed_as_theirs_s": as_theirs,
        "rehearsed_error": as_theirs / case.step_s - 1,
        "as_ours_error": step.step_s / case.step_s - 1,
    }


def repeated(rank: RehearsedRank, times: float) -> RehearsedRank:
    """A rank whose step has its forwards and backwards so many times."""
    phases = {name: seconds * (times if name in PASSES else 1.0) for name, seconds in rank.phases_s.items()}
    return replace(
        rank, phases_s=phases, step_s=rank.step_s * sum(phases.values()) / max(sum(rank.phases_s.values()), 1e-12)
    )


def measurements(rank: RehearsedRank) -> dict[str, Any]:
    """What was measured of a rank here."""
    found: dict[str, Any] = {"rank": rank.rank, "place": rank.place, "state": rank.state, "step_s": rank.step_s}
    found |= {"phases_s": rank.phases_s, "actions_s": rank.actions_s, "kernels": rank.kernels}
    return found | {"allocated_bytes": None if rank.memory is None else rank.memory.allocated_bytes}


def shown(row: dict[str, Any]) -> str:
    """A run in a few lines."""
    text = f"{row['id']} ({row['run']}), {row['wall_s']} s: {row['state']}"
    if row["state"] != "measured" or "published_s" not in row:
        return f"{text} {row.get('why', '')}"
    text += f"\n  published {row['published_s']:.3f} s, planned {row['planned_s']:.3f} ({row['planned_error']:+.1%})"
    text += f", rehearsed as theirs {row['rehearsed_as_theirs_s']:.3f} ({row['rehearsed_error']:+.1%})"
    text += f"\n  as ours: planned {row['planned_as_ours_s']:.3f}, rehearsed {row['rehearsed_s']:.3f}"
    text += f" ({row['rehearsed_against_plan']:+.1%} of its plan; {row['as_ours_error']:+.1%} of the published)"
    text += f", of which measured {row['rehearsed_measured_s']:.3f} and wire {row['rehearsed_modelled_s']:.3f}"
    return text


def errors(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Mean and largest error, and how many runs are within the goal."""
    sentences = []
    for name in ("planned_error", "rehearsed_error", "as_ours_error", "rehearsed_against_plan"):
        sizes = [abs(row[name]) for row in rows if name in row]
        if sizes:
            within = sum(size <= GOAL for size in sizes)
            figures = f"mean {statistics.mean(sizes):.1%}, largest {max(sizes):.1%}"
            sentences.append(f"{name}: {figures}, {within} of {len(sizes)} within {GOAL:.0%}")
    return sentences


if __name__ == "__main__":
    main()
