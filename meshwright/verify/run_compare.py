"""Whether a run in some layout wrote down and saved what one process did: every row, and every tensor at the end."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import Checkpoint, checkpoint_path
from meshwright.job import Job
from meshwright.verify.compare import Comparison, Kind, measure
from meshwright.verify.run_plan import Leg

FACTS = ("lr", "tokens")
"""What a row must hold to the last digit."""


@dataclass(frozen=True)
class Record:
    """What one attempt of a run left."""

    rows: list[dict[str, Any]]
    """Of its metrics: steps and evaluations in the order in which they came."""
    tensors: dict[str, Tensor]
    """The last checkpoint's weights and optimizer states."""
    position: int
    """Samples of the global stream that were used."""


def read_record(run: Path, attempt: int, steps: int) -> Record:
    """What the newest attempt of a run wrote and saved."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["attempt"] == attempt]
    checkpoint = Checkpoint.open(checkpoint_path(run, steps))
    with checkpoint:
        names = [*checkpoint.names("model/"), *checkpoint.names("optimizer/")]
        tensors = {name: checkpoint.whole(name).clone() for name in names}
    return Record(rows, tensors, checkpoint.facts.position)


def compare_records(leg: Leg, seen: Record, reference: Record, bounds: dict[Kind, float]) -> list[Comparison]:
    """Every number of a leg beside the single process's, in the order in which they came."""
    where = f"{leg.name}" + (f" from step {leg.start}" if leg.start else "")
    rows = _rows(where, leg.start, seen.rows, reference.rows, bounds)
    rows += _tensors(where, leg.job, seen.tensors, reference.tensors, bounds)
    off = abs(seen.position - reference.position)
    return [*rows, Comparison("data", f"{where}: position", float(off), 0.0)]


def _rows(
    where: str, start: int, seen: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], bounds: dict[Kind, float]
) -> list[Comparison]:
    found = {_key(row): row for row in seen}
    # A resumed run does not evaluate before its first step.
    wanted = {_key(row): row for row in expected if row["step"] > start or start == 0}
    rows = []
    for key, row in wanted.items():
        step, name = row["step"], f"{where}: step {row['step']}"
        got = found.get(key)
        if got is None:
            rows.append(Comparison(_kind(row), name, math.inf, bounds[_kind(row)], "the run wrote no such row"))
            continue
        for column, kind in _columns(row):
            error = _relative(got[column], row[column])
            rows.append(Comparison(kind, name, error, bounds[kind] * max(1, step)))
        if "loss" in row:
            off = [column for column in FACTS if got[column] != row[column]]
            rows.append(Comparison("data", name, float(len(off)), 0.0, " and ".join(off) + " differ" if off else ""))
    for step in sorted({key[0] for key in found.keys() - wanted.keys()}):
        note = "one process wrote no such row"
        rows.append(Comparison("data", f"{where}: step {step}", math.inf, 0.0, note))
    return rows


def _key(row: dict[str, Any]) -> tuple[int, str, str]:
    return row["step"], _kind(row), row.get("set", "")


def _kind(row: dict[str, Any]) -> Kind:
    return "loss" if "loss" in row else "evaluation"


def _columns(row: dict[str, Any]) -> list[tuple[str, Kind]]:
    if "loss" in row:
        return [("loss", "loss"), ("grad_norm", "norm")]
    return [("val_loss" if "val_loss" in row else "set_loss", "evaluation")]


def _relative(value: Any, expected: Any) -> float:
    """Numbers that are not finite were written as words."""
    return abs(float(value) - float(expected)) / max(abs(float(expected)), 1e-12)


def _tensors(
    where: str, job: Job, seen: dict[str, Tensor], expected: dict[str, Tensor], bounds: dict[Kind, float]
) -> list[Comparison]:
    rows = []
    for name, whole in expected.items():
        kind: Kind = "weight" if name.startswith("model/") else "state"
        shown, value = f"{where}: {name}", seen.get(name)
        if value is None or value.shape != whole.shape:
            told = "is not in its checkpoint" if value is None else f"has shape {tuple(value.shape)}"
            rows.append(Comparison(kind, shown, math.inf, bounds[kind], f"{told}, not {tuple(whole.shape)}"))
            continue
        scale = max(float(whole.double().abs().max()), torch.finfo(torch.float32).tiny)
        rows.append(Comparison(kind, shown, measure(value, whole, scale), bounds[kind]))
    for name in seen.keys() - expected.keys():
        rows.append(Comparison("state", f"{where}: {name}", math.inf, bounds["state"], "one process has no such tensor"))
    return rows
