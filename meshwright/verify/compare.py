"""Whether the ranks' results equal those of one process: coverage, the error measure, and a verdict."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.verify.observe import Observation, Shard
from meshwright.verify.pair_sizes import PairSizes

Kind = Literal[
    "loss", "norm", "evaluation", "margin", "gradient", "update", "metric", "fused", "sum", "routing", "weight",
    "state", "data", "leak",
]  # fmt: skip

BOUNDS: dict[str, dict[Kind, float]] = {
    "float64": dict.fromkeys(("loss", "norm", "evaluation", "margin", "gradient", "update", "metric"), 1e-9),
    # Adam's first steps are nearly the sign of the gradient, so in float32 an update shows rounding, not bugs.
    "float32": dict.fromkeys(("loss", "norm", "evaluation", "margin", "gradient"), 1e-5),
}
"""Largest error that counts as equal, by number format; kinds without a bound are shown without a verdict.

Formats with fewer bits are checked by `formats`.
"""

FLOOR = 1e-6
"""Share of the largest gradient entry below which a tensor counts as zero: some gradients are mathematically zero."""

ZERO = 1e-12
"""The same share in the single-process float64 run: only rounding is this small."""


@dataclass(frozen=True)
class Comparison:
    """One number or tensor of the layout compared with the single process's."""

    kind: Kind
    name: str
    error: float
    bound: float | None
    note: str = ""
    """What is wrong beyond the error, such as entries that no rank holds."""
    format: str = ""
    """The job's own number format, where that is being checked."""

    @property
    def ok(self) -> bool | None:
        """Equal or not; None where there is no bound for it."""
        if self.note:
            return False
        return None if self.bound is None else self.error <= self.bound  # False for a NaN


def compare(
    ranks: Sequence[Observation],
    reference: Observation,
    dtype: str,
    zeros: Collection[str] = (),
    pairs: PairSizes | None = None,
) -> list[Comparison]:
    """Every loss, norm, evaluation, margin of preferences, metric, router's preference, first-step gradient and update
    of all ranks compared with the reference's, in that order.

    `zeros` are parameters whose gradient is mathematically zero: in float32 they hold rounding far above FLOOR, so they
    are measured against the largest gradient entry instead.
    """
    bounds = BOUNDS[dtype]
    margin_floor = 0.0 if pairs is None else pairs.margin_size
    gradients = {name: shard.values for name, shard in reference.gradients.items()}
    updates = {name: shard.values for name, shard in reference.updates.items()}
    largest = _largest(gradients.values())
    floor = FLOOR * largest
    floors = {name: largest if name in zeros else floor for name in gradients}
    rows = series_rows(
        "loss", series_errors([rank.losses for rank in ranks], reference.losses, floor), bounds.get("loss")
    )
    rows += series_rows(
        "norm", series_errors([rank.norms for rank in ranks], reference.norms, floor), bounds.get("norm")
    )
    rows += series_rows(
        "evaluation",
        series_errors([rank.evaluations for rank in ranks], reference.evaluations, floor),
        bounds.get("evaluation"),
    )
    rows += series_rows(
        "margin",
        series_errors([rank.margins for rank in ranks], reference.margins, margin_floor),
        bounds.get("margin"),
    )
    for name, expected in sorted(reference.metrics.items()):
        errors = series_errors([rank.metrics.get(name, []) for rank in ranks], expected, floor)
        rows += series_rows("metric", errors, bounds.get("metric"), of=f"{name}, step")
    preferences = {name: shard.values for name, shard in reference.preferences.items()}
    exactly = dict.fromkeys(preferences, 0.0)
    rows += _tensors("metric", [rank.preferences for rank in ranks], preferences, exactly, bounds)
    rows += _tensors("gradient", [rank.gradients for rank in ranks], gradients, floors, bounds)
    rows += _tensors("update", [rank.updates for rank in ranks], updates, floors, bounds)
    return rows


def zero_gradients(seen: Observation) -> set[str]:
    """Parameters whose gradient is mathematically zero, found from a single-process run in float64."""
    floor = ZERO * _largest([shard.values for shard in seen.gradients.values()])
    return {name for name, shard in seen.gradients.items() if _largest([shard.values]) <= floor}


def first_wrong(rows: Sequence[Comparison]) -> Comparison | None:
    """Where to start looking for the bug: a gradient if one is wrong, else the first value that depends on them."""
    wrong = [row for row in rows if row.ok is False]
    return min(wrong, key=_turn, default=None)


def _turn(row: Comparison) -> tuple[bool, int]:
    return bool(row.format), _place(row)


def _place(row: Comparison) -> int:
    if row.kind == "gradient":
        return 0
    if row.name.endswith(" 1"):  # the first loss, norm or evaluation
        return 1
    return 2 if row.kind == "update" else 3


def worst(rows: Sequence[Comparison]) -> Comparison:
    """The row with the largest error for its bound; wrong ones come first, NaN before all, rows without a bound
    last."""
    return max(rows, key=_severity)


def _severity(row: Comparison) -> tuple[bool, bool, bool, float]:
    return row.ok is False, row.ok is not None, math.isnan(row.error), row.error / (row.bound or 1.0)


def measure(value: Tensor, expected: Tensor, scale: float) -> float:
    """max|a − b| / scale; NaN where either side has one, infinite where all that is expected is zero."""
    if value.numel() == 0:
        return 0.0
    return _relative(float((value.double() - expected.double()).abs().max()), scale)


def _relative(difference: float, scale: float) -> float:
    return difference / scale if scale else math.inf if difference else 0.0


def series_errors(ranks: list[list[float]], expected: list[float], floor: float = 0.0) -> list[float]:
    """The relative error of each step's number; the worst rank counts, since every rank reports the whole step's."""
    errors = []
    for step, value in enumerate(expected):
        given = [series[step] if step < len(series) else math.nan for series in ranks]
        errors.append(measure(_float64(given), _float64(value), max(abs(value), floor)))
    return errors


def series_rows(kind: Kind, errors: list[float], bound: float | None, of: str = "") -> list[Comparison]:
    """A row for each step's or evaluation's number."""
    of = of or ("evaluation" if kind in ("evaluation", "margin") else "step")
    return [Comparison(kind, f"{of} {number}", error, bound) for number, error in enumerate(errors, 1)]


def _tensors(
    kind: Kind,
    ranks: list[dict[str, Shard]],
    expected: dict[str, Tensor],
    floors: dict[str, float],
    bounds: dict[Kind, float],
) -> list[Comparison]:
    rows = [
        _tensor(kind, name, [held[name] for held in ranks if name in held], whole, floors[name], bounds.get(kind))
        for name, whole in expected.items()
    ]
    for name in dict.fromkeys(name for held in ranks for name in held if name not in expected):
        rows.append(Comparison(kind, name, math.inf, bounds.get(kind), "one process has no such parameter"))
    return rows


def _tensor(kind: Kind, name: str, shards: list[Shard], whole: Tensor, floor: float, bound: float | None) -> Comparison:
    found, note = differences(shards, whole)
    return Comparison(kind, name, _relative(float(found.max()), max(float(whole.abs().max()), floor)), bound, note)


def differences(shards: list[Shard], whole: Tensor) -> tuple[Tensor, str]:
    """The error of every entry of a tensor on the worst rank, and what else is wrong.

    Every rank's shard is compared, so replicas that have diverged are detected; padding is expected to be zero.
    """
    found, covered = torch.zeros(whole.shape, dtype=torch.float64), torch.zeros(whole.shape, dtype=torch.bool)
    for shard in shards:
        if shard.index.shape != tuple(whole.shape):
            return torch.full_like(found, math.inf), f"shape {shard.index.shape}, not {tuple(whole.shape)}"
        shard.index.put(covered, torch.ones_like(shard.values, dtype=torch.bool))
        off = (shard.values.double() - shard.index.take(whole).double()).abs()
        shard.index.put(found, torch.maximum(off, shard.index.take(found)))
        if bool(off[shard.index.rows >= whole.shape[0]].any()):
            return torch.full_like(found, math.inf), "padding is not zero"
    missing = int((~covered).sum())
    return found, f"{missing} of {whole.numel()} entries are held by no rank" if missing else ""


def _largest(tensors: Iterable[Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


def _float64(numbers: list[float] | float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
