"""Random jobs under test: each equals one process, or is refused in one sentence that says what to do."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshwright.job import job_fields
from meshwright.verify.check import Verdict
from meshwright.verify.generate import Draw, refusal_of
from meshwright.verify.matrix import Line, LineResult, run_matrix

Outcome = Literal[
    "equal",
    "vacuous",
    "refused",
    "refused in ranks",
    "not equal",
    "breaks the contract",
    "crashed",
    "hung",
    "refused badly",
]
"""Vacuous is a check of equal numbers that prove nothing about a part of the job, by chance."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
WRONG: tuple[Outcome, ...] = ("not equal", "breaks the contract", "crashed", "hung", "refused badly")
_FIELD = re.compile(r"\b[a-z]+\.[a-z_0-9]+\b")
_SETTING = re.compile(r"\b([a-z]+)\.([a-z_0-9]+) = (\"[^\"]*\"|true|false|[\d.]+\b)")
_FIELDS = frozenset(name for name, _ in job_fields())


@dataclass(frozen=True)
class Answer:
    """The result of one drawn job."""

    draw: Draw
    outcome: Outcome
    sentence: str | None = None
    """Why it was refused, or the error."""
    verdict: Verdict | None = None

    @property
    def wrong(self) -> bool:
        """Whether it is neither equal nor refused as it should be."""
        return self.outcome in WRONG


def run_draws(
    draws: Sequence[Draw],
    dtype: str = "float64",
    device: str = "cpu",
    collectives: bool = True,
    began: Callable[[Line], None] = lambda line: None,
) -> Iterator[Answer]:
    """Check every draw: refused ones first, the others as they finish."""
    lines = {}
    for draw in draws:
        if draw.refusal is None:
            lines[draw.name] = draw
        elif (fault := fault_of(draw.refusal, draw.table)) is not None:
            yield Answer(draw, "refused badly", f"{draw.refusal}\n({fault})")
        else:
            yield Answer(draw, "refused", draw.refusal)
    matrix = [Line(name, draw.job, quick=False, own_model=False) for name, draw in lines.items()]
    for result in run_matrix(matrix, dtype, device, collectives, began):
        yield _answer(lines[result.line.name], result)


def subject_of(refusal: str) -> str:
    """The fields a refusal is about, by which refusals are counted: those it names before its remedy."""
    problem, _, _ = refusal.partition(";")
    named = [field for field in _FIELD.findall(problem) if field in _FIELDS]
    return ", ".join(dict.fromkeys(named))


def fault_of(refusal: str, table: dict[str, Any]) -> str | None:
    """What a refusal lacks: it is one sentence with a field, its value and a remedy, and the remedy works."""
    problem, semicolon, remedy = refusal.partition(";")
    if "\n" in refusal:
        return "more than one sentence"
    if not subject_of(refusal) or "=" not in problem:
        return "no field with its value"
    if not semicolon or not remedy.strip():
        return "no remedy"
    settings = [(section, field, _value(text)) for section, field, text in _SETTING.findall(remedy)]
    tried = [[setting] for setting in settings] + [settings]
    if settings and all(refusal_of(_with(table, changes), refusal.partition(":")[0]) == refusal for changes in tried):
        return "the remedy is refused with the same error"
    return None


def _with(table: dict[str, Any], changes: Sequence[tuple[str, str, Any]]) -> dict[str, Any]:
    changed = {section: dict(fields) for section, fields in table.items()}
    for section, field, value in changes:
        changed.setdefault(section, {})[field] = value
    return changed


def _value(text: str) -> Any:
    if text.startswith('"'):
        return text.strip('"')
    if text in ("true", "false"):
        return text == "true"
    return float(text) if "." in text else int(text)


def _answer(draw: Draw, result: LineResult) -> Answer:
    if (verdict := result.verdict) is not None:
        broken = None if verdict.collectives is None or verdict.collectives.ok else verdict.collectives.violations[0]
        outcome: Outcome = (
            "not equal" if verdict.equal is False else "equal" if broken is None else "breaks the contract"
        )
        return Answer(draw, outcome, broken, verdict)
    outcomes: dict[Any, Outcome] = {"refused": "refused in ranks", "vacuous": "vacuous", "hung": "hung"}
    return Answer(draw, outcomes.get(result.failure, "crashed"), result.error)
