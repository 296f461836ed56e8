"""How often intervals hold what was measured, and how far layouts of one job err relative to each other."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.plan.interval import LEVEL, weighted_quantile
from meshwright.plan.machine import machine_of
from meshwright.plan.residuals import Kind, Residual, Residuals, residuals, with_factors
from meshwright.plan.traits import Traits, is_calibrated, traits_of

if TYPE_CHECKING:
    from meshwright.plan.validate import Outcome

_SURE = 0.8
"""How sure the order of two layouts is to be for them not to be a tie."""


def made_residuals(outcomes: "Iterable[Outcome]", recorded: Iterable[Residual], names: Mapping[str, str]) -> Residuals:
    """The table of the package from predictions of measured runs, and from runs that were compared elsewhere.

    Runs that a guessed rate was chosen to meet say nothing about predictions, and are left out.
    """
    known = [outcome for outcome in outcomes if outcome.case.use != "fitted"]
    rows = [
        Residual(one.case.id, one.case.source, _traits(one), _error(one, "time"), _error(one, "memory"))
        for one in known
    ]
    return with_factors([*rows, *recorded], names, bands_of(known))


def coverage(outcomes: "Iterable[Outcome]", table: Residuals | None = None) -> dict[str, Any]:
    """How many measurements lie in the intervals that all other sources give them, of time and of memory, by source.

    Neither a source's rows nor its share in the factor are used for its own intervals; a source that is not in the
    table gets the intervals that plans have. `all` are the published rows: ours are listed, but nearer than others'.
    """
    table = table or residuals()
    rows = [one for one in outcomes if one.case.use != "fitted"]
    kinds: tuple[Kind, Kind] = ("time", "memory")
    covered: dict[str, Any] = {kind: _covered(rows, table, kind) for kind in kinds}
    return {"level": LEVEL, **covered, "order": _order(rows, table)}


def _order(outcomes: "Sequence[Outcome]", table: Residuals) -> dict[str, dict[str, int]]:
    """Of layouts of one job, two by two: how many are told apart or called a tie, and are in the predicted order."""
    found = {"apart": {"pairs": 0, "right": 0}, "ties": {"pairs": 0, "right": 0}}
    for one, other, same in pairs(outcomes):
        gap = log(one.step_s / other.step_s)
        counts = found["apart" if abs(gap) > table.bands["same" if same else "other"] else "ties"]
        counts["pairs"] += 1
        counts["right"] += gap * log((one.case.step_s or 1.0) / (other.case.step_s or 1.0)) > 0
    return found


def _covered(outcomes: "Sequence[Outcome]", table: Residuals, kind: Kind) -> dict[str, Any]:
    evidence, count = table.evidence(kind), table.counted(kind)
    found: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    factors: dict[str, float] = {}
    for outcome in outcomes:
        error, source = _error(outcome, kind), outcome.case.source
        if error is None:
            continue
        if source not in factors:
            known = source in evidence.sources
            factors[source] = evidence.factor(count, source) if known else table.factors[kind]
        spread = evidence.spread(_traits(outcome), factors[source], without=source)
        found[source].append((spread.low <= error <= spread.high, spread.high - spread.low))
    ours = {outcome.case.source for outcome in outcomes if outcome.case.use == "own"}
    others = [one for source, rows in found.items() if source not in ours for one in rows]
    return {"all": _share(others), "sources": {source: _share(found[source]) for source in sorted(found)}}


def _share(rows: Sequence[tuple[bool, float]]) -> dict[str, Any]:
    inside = [held for held, _ in rows]
    return {
        "rows": len(rows),
        "inside": sum(inside),
        "share": sum(inside) / len(rows) if rows else None,
        "half_width": float(np.mean([width for _, width in rows])) / 2 if rows else None,
    }


def _traits(outcome: "Outcome") -> Traits:
    case = outcome.case
    calibrated = case.software.own and is_calibrated(machine_of(case.cluster))
    gpus = case.cluster.nodes * case.cluster.gpus_per_node
    gpu, counted = str(case.cluster.gpu), case.memory_counted
    return traits_of(case.job, gpu, gpus, case.software, calibrated=calibrated, counted=counted)


def _error(outcome: "Outcome", kind: Kind) -> float | None:
    case = outcome.case
    if kind == "time":
        return log(case.step_s / outcome.step_s) if case.step_s else None
    return log(case.memory_bytes / outcome.memory_bytes) if case.memory_bytes else None


def bands_of(outcomes: "Iterable[Outcome]") -> dict[str, float]:
    """How much faster one layout must be predicted than another of the same job to be so in 8 of 10 cases.

    What two layouts err alike cancels; what is left depends on whether they use the same axes. A source of n pairs
    counts as one of √n.
    """
    differences: dict[str, list[tuple[str, float]]] = {"same": [], "other": []}
    for one, other, same in pairs(outcomes):
        apart = (_error(one, "time") or 0.0) - (_error(other, "time") or 0.0)
        differences["same" if same else "other"].append((one.case.source, abs(apart)))
    return {kind: _band(rows) for kind, rows in differences.items()}


def _band(rows: Sequence[tuple[str, float]]) -> float:
    if not rows:
        return 0.0
    counts: dict[str, int] = defaultdict(int)
    for source, _ in rows:
        counts[source] += 1
    weights = np.array([1.0 / np.sqrt(counts[source]) for source, _ in rows])
    # One side of a symmetric difference: an order is wrong in 2 of 10 cases beyond the 6th of 10 sizes.
    return weighted_quantile(np.array([size for _, size in rows]), weights, 2 * _SURE - 1)


def pairs(outcomes: "Iterable[Outcome]") -> "Iterable[tuple[Outcome, Outcome, bool]]":
    """Layouts of the same job that were both measured, and whether they use the same axes.

    Without mixtures, whose tables repeat over versions of a program that differ more than layouts do.
    """
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.case.group is not None and outcome.case.step_s and not outcome.case.job.model.experts:
            groups[outcome.case.group].append(outcome)
    for rows in groups.values():
        for one, other in combinations(rows, 2):
            if one.case.job != other.case.job:
                yield one, other, _degrees(one) == _degrees(other)


def _degrees(outcome: "Outcome") -> tuple[int, ...]:
    layout = outcome.case.job.layout
    return layout.tp, layout.cp, layout.ep, layout.pp, layout.zero_stage
