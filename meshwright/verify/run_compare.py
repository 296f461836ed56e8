"""Whether a run in some layout logged and saved what one process did: every row, and every tensor at the end."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import Checkpoint, checkpoint_path
from meshwright.job import Job
from meshwright.verify.compare import Comparison, Kind, measure
from meshwright.verify.run_plan import Leg

TINY = torch.finfo(torch.float32).tiny
FACTS = ("lr", "tokens")
"""Fields of a row that must match exactly."""

ROUNDING = {"float64": 1e-9, "float32": 1e-5}
"""Largest error that counts as equal where states are kept in the format of the masters."""

UNIT = {"fp32": 0.0, "bf16": 2**-7, "int8": 1 / 127}
"""The distance between neighbouring values in a state's format, relative to the largest."""


def run_bounds(job: Job, dtype: str) -> dict[Kind, float]:
    """Largest error that counts as equal, by what is compared.

    With eps 1e-3 an AdamW update is no larger than the gradient's rounding makes it, so float32's bound holds for all
    steps and for weights and states too. A state of few bits between two values may be rounded to either: it
    is then off by a unit, next to the one its neighbours in time already are; an update by that share of it.
    """
    rounding, unit = ROUNDING[dtype], 0.0 if dtype == "float64" else UNIT[job.precision.optimizer_states]
    bounds: dict[Kind, float] = dict.fromkeys(("loss", "norm", "evaluation"), rounding + unit / 100)
    return bounds | {"weight": rounding + unit / 4, "state": rounding + 2 * unit}


@dataclass(frozen=True)
class Record:
    """What one attempt of a run left."""

    rows: list[dict[str, Any]]
    """Rows of its metrics: steps and evaluations in order."""
    tensors: dict[str, Tensor]
    """The last checkpoint's weights, optimizer states and preferences of routers."""
    position: int
    """Samples of the global stream that were used."""


def read_record(run: Path, attempt: int, steps: int) -> Record:
    """What the newest attempt of a run wrote and saved."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["attempt"] == attempt]
    checkpoint = Checkpoint.open(checkpoint_path(run, steps))
    with checkpoint:
        names = [name for group in ("model/", "optimizer/", "routing/") for name in checkpoint.names(group)]
        tensors = {name: checkpoint.whole(name).clone() for name in names}
    return Record(rows, tensors, checkpoint.facts.position)


def compare_records(
    leg: Leg, seen: Record, reference: Record, bounds: dict[Kind, float], zeros: Collection[str]
) -> list[Comparison]:
    """Every number of a leg compared with the single process's, in order.

    `zeros` are parameters whose gradient is mathematically zero, so that they and their states hold only rounding
    errors.
    """
    where = f"{leg.name}" + (f" from step {leg.start}" if leg.start else "")
    rows = _rows(where, leg.start, seen.rows, reference.rows, bounds)
    rows += _tensors(where, seen.tensors, reference.tensors, bounds, zeros)
    off = abs(seen.position - reference.position)
    return [*rows, Comparison("data", f"{where}: position", float(off), 0.0)]


def _rows(
    where: str,
    start: int,
    seen: Sequence[dict[str, Any]],
    expected: Sequence[dict[str, Any]],
    bounds: dict[Kind, float],
) -> list[Comparison]:
    found = {_key(row): row for row in seen}
    # A resumed run does not evaluate before its first step.
    wanted = {_key(row): row for row in expected if row["step"] > start or start == 0}
    rows = []
    for key, row in wanted.items():
        name = f"{where}: step {row['step']}"
        got = found.get(key)
        if got is None:
            rows.append(Comparison(_kind(row), name, math.inf, bounds[_kind(row)], "the run wrote no such row"))
            continue
        for column, kind in _columns(row):
            rows.append(Comparison(kind, name, _relative(got[column], row[column]), bounds[kind]))
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
    """Non-finite numbers were written as strings."""
    return abs(float(value) - float(expected)) / max(abs(float(expected)), 1e-12)


def _tensors(
    where: str,
    seen: dict[str, Tensor],
    expected: dict[str, Tensor],
    bounds: dict[Kind, float],
    zeros: Collection[str],
) -> list[Comparison]:
    largest: dict[str, float] = {}
    for name, whole in expected.items():
        largest[_key_of(name)] = max(largest.get(_key_of(name), 0.0), _size(whole))
    rows = []
    for name, whole in expected.items():
        kind: Kind = "weight" if name.startswith("model/") else "state"
        shown, value = f"{where}: {name}", seen.get(name)
        if value is None or value.shape != whole.shape:
            report = "is not in its checkpoint" if value is None else f"has shape {tuple(value.shape)} there"
            rows.append(Comparison(kind, shown, math.inf, bounds[kind], report))
            continue
        scale = largest[_key_of(name)] if _parameter_of(name) in zeros else _size(whole)
        rows.append(Comparison(kind, shown, measure(value, whole, max(scale, TINY)), bounds[kind]))
    for name in seen.keys() - expected.keys():
        rows.append(
            Comparison("state", f"{where}: {name}", math.inf, bounds["state"], "one process has no such tensor")
        )
    return rows


def _parameter_of(name: str) -> str:
    group, _, rest = name.partition("/")
    return rest if group == "model" else rest.rpartition("/")[0]


def _key_of(name: str) -> str:
    """Which of the tensors kept of each parameter: itself, or one of its states."""
    return "" if name.startswith("model/") else name.rpartition("/")[2]


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
