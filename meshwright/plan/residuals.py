"""The errors of predictions that come with the package: one row for every measured run, and what they add up to.

`python scripts/plan_evidence.py` writes them again, with docs/accuracy.md, whenever a formula or the evidence changes.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from meshwright.plan.interval import Evidence
from meshwright.plan.traits import AXES, Traits

Kind = Literal["time", "memory"]
FILE = "residuals.json"


@dataclass(frozen=True)
class Residual:
    """One measured run: what it is like, and logarithms of measured over predicted."""

    id: str
    source: str
    traits: Traits
    time: float | None
    memory: float | None
    recorded: bool = False
    """Compared when it was measured: its machine is not here to be predicted again."""


@dataclass(frozen=True)
class Residuals:
    """All measured runs."""

    rows: tuple[Residual, ...]
    names: Mapping[str, str]
    """What a source is called, by the first part of its rows' ids."""
    factors: Mapping[str, float]
    """Of intervals of time and of memory (`Evidence.factor`)."""
    bands: Mapping[str, float]
    """How near two layouts of one job are taken to be a tie: with the `same` axes, and with `other` ones."""

    def evidence(self, kind: Kind) -> Evidence:
        """The rows with an error of time, or of memory."""
        rows = self.of(kind)
        errors = [float(getattr(row, kind)) for row in rows]
        return Evidence([row.traits for row in rows], errors, [row.source for row in rows], kind)

    def of(self, kind: Kind) -> tuple[Residual, ...]:
        """The rows themselves."""
        return tuple(row for row in self.rows if getattr(row, kind) is not None)

    def counted(self, kind: Kind) -> list[bool]:
        """Which of these rows the factor is found from: those whose errors are of today's formulas."""
        return [not row.recorded for row in self.of(kind)]

    def text(self) -> str:
        """As a file, a row per line."""
        head = {"names": dict(self.names), "factors": _rounded(self.factors), "bands": _rounded(self.bands)}
        rows = ",\n".join(json.dumps(_cells(row), separators=(",", ":")) for row in self.rows)
        return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n]}}\n'


def with_factors(rows: Iterable[Residual], names: Mapping[str, str], bands: Mapping[str, float]) -> Residuals:
    """The rows with the factors that they give."""
    plain = Residuals(tuple(rows), names, {}, bands)
    kinds: tuple[Kind, Kind] = ("time", "memory")
    factors: dict[str, float] = {kind: plain.evidence(kind).factor(plain.counted(kind)) for kind in kinds}
    return Residuals(plain.rows, names, factors, bands)


@cache
def residuals() -> Residuals:
    """Those of the package."""
    return read_residuals((files("meshwright.plan") / FILE).read_text(encoding="utf-8"))


def read_residuals(text: str) -> Residuals:
    """From the text of a file."""
    found = json.loads(text)
    return Residuals(tuple(map(_row, found["rows"])), found["names"], found["factors"], found["bands"])


@cache
def evidence_of(kind: Kind) -> tuple[Evidence, float]:
    """The package's evidence of time or memory, and the factor of its intervals."""
    return residuals().evidence(kind), residuals().factors[kind]


def _cells(row: Residual) -> list[Any]:
    one = row.traits
    axes = " ".join(axis for axis in AXES if axis in one.axes)
    based = (one.calibrated, one.own, row.recorded)
    errors = [None if error is None else round(error, 4) for error in (row.time, row.memory)]
    return [row.id, one.gpu, one.gpus, axes, one.program, one.precision, *map(int, based), *errors, one.counted]


def _row(cells: list[Any]) -> Residual:
    name, gpu, gpus, axes, program, precision, calibrated, own, recorded, time, memory, counted = cells
    traits = Traits(gpu, gpus, bool(calibrated), bool(own), frozenset(axes.split()), program, precision, counted)
    return Residual(name, name.rpartition("-")[0], traits, time, memory, bool(recorded))


def _rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: round(number, 4) for name, number in numbers.items()}
