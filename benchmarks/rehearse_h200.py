"""One rank of large jobs on one GPU: planned memory and compute against the rehearsed ones.

    python benchmarks/rehearse_h200.py [--only TEXT]… [--seconds S] [--out FILE]
    python benchmarks/rehearse_h200.py --tiny           # the same on a CPU in seconds: shows that the script runs

Every line is `meshwright rehearse --rank R` in its own process: the rank at full size with the other ranks' messages
replaced, synthetic tokens, bf16 compute with fp32 masters, AdamW. A step has only --micro-batches micro-batches per
rank (with a pipeline at least as many as it has stages), which changes neither the peak nor the time of one; the plan
is asked about the same step. No checkpoint is written unless --checkpoint says so: shares of up to 43 GB go through the
temporary folder. Memory is the allocator's peak against the planned terms' sum, reserved
memory is shown with it. Compute is the median step, in which messages take no time, against the plan for this GPU with
links without limit: of a pipeline rank its forwards and backwards by the schedule's actions, each waited for.

--out gets one JSON line per rank as soon as it is measured; its lines so far are in the errors at the end too, so that
the rest can be measured by another call with the same file. No process is started after --seconds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.hardware import find_gpu
from meshwright.job import Job, load_job
from meshwright.layout import ranks_of
from meshwright.plan import any_machines, predict, timeline
from meshwright.rehearse import Rehearsal, RehearsedRank
from meshwright.rehearse.kinds import first_rank

HERE = Path(__file__).parent
GIB = 2**30
LIMIT_S = 420
"""A process that takes longer has hung."""
NO_LIMIT = {"node": 1e9, "network": 1e9}
"""Links in GB/s at which no message takes time."""
NOT_COMPUTE = ("pipeline bubble and sends", "waiting for the slowest node")

MOST = "most"
"""Beside a batch's fields: micro-batches of a step, where those take long."""

Fields = dict[str, dict[str, Any]]

EIGHT = {"model": {"preset": "llama-3-8b"}, "layout": {"dp_shard": 8, "zero": 3}}
SEVENTY = {"model": {"preset": "llama-3-70b"}, "layout": {"dp_shard": 4, "tp": 4, "pp": 4, "zero": 1}}
RECIPE = {"model": {"preset": "llama-3-70b"}, "layout": {"dp_shard": 8, "tp": 8, "zero": 3}}
LARGEST = {"model": {"preset": "llama-3.1-405b"}, "layout": {"dp_shard": 128, "tp": 8, "pp": 16, "zero": 1}}
MIXTURE = {"model": {"preset": "qwen3-30b-a3b"}, "layout": {"dp_shard": 8, "ep": 8, "zero": 3}}
LONG = {"model": {"preset": "llama-3.1-8b"}, "layout": {"dp_shard": 1, "cp": 8, "zero": 3}}

LINES: dict[str, tuple[Fields, int]] = {
    "8b dp_shard 8 zero 3": ({**EIGHT, "batch": {"sequence_length": 8192, "micro_batch": 1}}, 0),
    "8b dp_shard 8 zero 3, selective": (
        {**EIGHT, "batch": {"sequence_length": 8192, "micro_batch": 2}, "memory": {"recompute": "selective"}},
        0,
    ),
    **{
        f"70b dp 4 tp 4 pp 4, {place}": (
            {**SEVENTY, "batch": {"sequence_length": 4096, "micro_batch": 1}, "memory": {"recompute": "selective"}},
            rank,
        )
        for place, rank in (("first", 0), ("middle", 1), ("last", 3))
    },
    "70b on 64: recipe pretrain-70b-64xh100": (
        {**RECIPE, "batch": {"sequence_length": 4096, "micro_batch": 4}, "memory": {"recompute": "selective"}},
        0,
    ),
    **{
        f"405b tp 8 pp 16 dp 128, {place}": (
            {**LARGEST, "batch": {"sequence_length": 8192, "micro_batch": 1}, "memory": {"recompute": "selective"}},
            rank,
        )
        for place, rank in (("first", 0), ("last", 15))
    },
    "qwen3-30b-a3b ep 8, full": (
        {**MIXTURE, "batch": {"sequence_length": 4096, "micro_batch": 4}, "memory": {"recompute": "full"}},
        0,
    ),
    "8b cp 8 at 131072": (
        {**LONG, "batch": {"sequence_length": 131072, "micro_batch": 1, MOST: 1}, "memory": {"recompute": "full"}},
        0,
    ),
    "qwen3-30b-a3b ep 8, too large": ({**MIXTURE, "batch": {"sequence_length": 4096, "micro_batch": 4}}, 0),
}
"""A job's fields and the pipeline rank to rehearse, by importance; the plan says that the last does not fit."""


def main() -> None:
    """Rehearse every line, print as results come, write after each one."""
    asked = parse()
    print(__doc__)
    began, rows = time.monotonic(), read_lines(asked.out)
    for name, (fields, pipeline_rank) in LINES.items():
        if asked.only and not any(text in name for text in asked.only):
            continue
        if time.monotonic() - began > asked.seconds:
            print(f"{name}: no time left", flush=True)
            continue
        row = {"line": name, **measured(tiny(fields) if asked.tiny else fields, pipeline_rank, asked)}
        rows.append(row)
        print(f"{name}: {shown(row)}", flush=True)
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **how(asked)}, ensure_ascii=False) + "\n")
    for sentence in errors(rows):
        print(sentence)


def parse() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="lines whose name contains this; may be repeated")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--checkpoint", action="store_true", help="also write the rank's share of a checkpoint")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compiled blocks")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rehearse_h200.jsonl")
    asked = parser.parse_args()
    if asked.tiny and asked.out == parser.get_default("out"):
        asked.out = Path(tempfile.mkdtemp()) / "rehearse_tiny.jsonl"
    return asked


def tiny(fields: Fields) -> Fields:
    """The same layout of a small model in small groups."""
    model = "tiny-moe" if "ep" in fields["layout"] else "tiny-llama"
    layout = {name: min(size, 2) if name not in ("zero", "pp") else size for name, size in fields["layout"].items()}
    layout["pp"] = min(layout.get("pp", 1), 4)
    batch = {"sequence_length": 64, "micro_batch": 1}
    changed = {"model": {"preset": model, "layers": 4}, "layout": layout, "batch": batch, "run": {"device": "cpu"}}
    return {**fields, **changed}


def measured(fields: Fields, pipeline_rank: int, asked: argparse.Namespace) -> dict[str, Any]:
    """One line: the rehearsed rank next to its plan."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "job.toml", Path(folder) / "rehearsal"
        file.write_text(job_text(fields, asked), encoding="utf-8")
        try:
            job = load_job(str(file)).job
        except UserError as error:
            return {"state": "refused", "why": str(error)}
        pipeline_rank = min(pipeline_rank, job.layout.pp - 1)
        rank = first_rank(job, pipeline_rank)
        command = [sys.executable, "-m", "meshwright", "rehearse", str(file), "--rank", str(rank), "--out", str(out)]
        command += ["--steps", str(asked.steps), "--checkpoint" if asked.checkpoint else "--no-checkpoint"]
        began = time.monotonic()
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return {"state": "hung", "why": f"longer than {LIMIT_S} s"}
        saved = out / "rehearsal.json"
        if not saved.exists():
            return {"state": "failed", "why": (ended.stderr or ended.stdout)[-800:]}
        rehearsal = Rehearsal.from_json(json.loads(saved.read_text()))
    row = {"state": rehearsal.ranks[0].state, "device": rehearsal.device, "torch": rehearsal.torch}
    row |= {"rank": rank, "world": rehearsal.world, "wall_s": round(time.monotonic() - began, 1)}
    return row | compared(job, rehearsal.ranks[0], rehearsal.device) | {"warnings": rehearsal.warnings}


def job_text(fields: Fields, asked: argparse.Namespace) -> str:
    """The job as TOML, with as many micro-batches per rank as asked for."""
    layout = fields["layout"]
    micro_batches = max(asked.micro_batches, layout.get("pp", 1))
    batch = {**fields["batch"]}
    micro_batches = min(micro_batches, batch.pop(MOST, micro_batches))
    batch["global_batch"] = batch["micro_batch"] * layout.get("dp_shard", 1) * micro_batches
    sections = {
        **fields,
        "batch": batch,
        "data": {"sources": ["builtin:synthetic"]},
        "precision": {"compute": "fp32" if asked.tiny else "bf16"},
        "evaluation": {"every_steps": 0},
        "run": {"steps": 100, "compile": asked.compile, **fields.get("run", {})},
    }
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def compared(job: Job, rank: RehearsedRank, device: str) -> dict[str, Any]:
    """Bytes and seconds, rehearsed and planned."""
    row: dict[str, Any] = {"needed_bytes": rank.needed_bytes}
    if (memory := rank.memory) is not None:
        row |= {
            "allocated_bytes": memory.allocated_bytes,
            "planned_bytes": memory.planned_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "planned_reserved_bytes": memory.planned_reserved_bytes,
            "by_kind": memory.by_kind,
            "planned_terms": memory.planned_terms,
            "memory_error": None if not memory.planned_bytes else memory.planned_bytes / memory.allocated_bytes - 1,
        }
        row |= {"step_s": rank.step_s, "phases_s": rank.phases_s, "actions_s": rank.actions_s}
        row |= {"checkpoint_bytes": rank.checkpoint_bytes, "checkpoint_s": rank.checkpoint_s}
        row |= planned_compute(job, rank, device)
    return row


def planned_compute(job: Job, rank: RehearsedRank, device: str) -> dict[str, Any]:
    """What the plan says of the rank's compute on this device; nothing if it does not know the device."""
    gpu = find_gpu(device)
    if gpu is None:
        return {}
    here = any_machines(ranks_of(job.layout)).model_copy(update={"gpu": gpu.key, "links": NO_LIMIT})
    phases = predict(job, here).phases
    planned = sum(seconds for name, seconds in phases.items() if name not in NOT_COMPUTE)
    rehearsed, actions = rank.step_s, dict[str, float]()
    if (played := timeline(job, here, job.accumulation)) is not None:
        _, simulation = played
        spans = [span for span in simulation.spans if span.rank == rank.pipeline_rank]
        for span in spans:
            actions[f"{span.action.kind.value}{span.action.stage}"] = span.end_s - span.start_s
        planned = sum(span.end_s - span.start_s for span in spans)
        rehearsed = sum(rank.actions_s[f"{span.action.kind.value}{span.action.stage}"] for span in spans)
    return {
        "compute_s": rehearsed,
        "planned_compute_s": planned,
        "planned_actions_s": actions,
        "planned_phases_s": phases,
        "compute_error": planned / rehearsed - 1,
    }


def shown(row: dict[str, Any]) -> str:
    """A line for people."""
    if "allocated_bytes" not in row:
        needs = f" needs {row['needed_bytes'] / GIB:.1f} GiB" if row.get("needed_bytes") else ""
        return f"{row['state']}{needs} {row.get('why', '')}"
    text = f"rank {row['rank']} of {row['world']}: {row['allocated_bytes'] / GIB:.3f} GiB"
    if row["memory_error"] is not None:
        text += f", planned {row['planned_bytes'] / GIB:.3f} ({row['memory_error']:+.1%})"
    if row["reserved_bytes"] is not None:
        text += f"; reserved {row['reserved_bytes'] / GIB:.2f}, planned {row['planned_reserved_bytes'] / GIB:.2f}"
    text += f"; step {1e3 * row['step_s']:,.0f} ms"
    if "compute_error" in row:
        planned, rehearsed = 1e3 * row["planned_compute_s"], 1e3 * row["compute_s"]
        text += f"; compute {rehearsed:,.0f} ms, planned {planned:,.0f} ({row['compute_error']:+.1%})"
    return f"{text}; {row['wall_s']} s in all"


def errors(rows: list[dict[str, Any]]) -> list[str]:
    """Mean and largest error of memory and of compute."""
    sentences = []
    for name in ("memory_error", "compute_error"):
        found = [abs(row[name]) for row in rows if row.get(name) is not None]
        if found:
            sentences.append(f"{name}: mean {sum(found) / len(found):.1%}, largest {max(found):.1%} of {len(found)}")
    return sentences


def how(asked: argparse.Namespace) -> dict[str, Any]:
    """When and how a line was measured."""
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    settings = {"steps": asked.steps, "micro_batches": asked.micro_batches, "compile": asked.compile}
    return {"measured": when, "settings": settings, "how": " ".join((__doc__ or "").split())}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What is in the file already."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
