"""The ledger of the lectures (docs/lectures.md) as tests read it: rows, comparisons, measured figures, verdicts.

A row has six cells: what the lectures say; commands, sums or tests; what they print; the lecture's number compared with
ours; what was measured; the verdict. The page itself explains the notation to readers.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from docs_pages import RESULTS, ROOT, Figure, holds, look_up

PAGE = ROOT / "docs" / "lectures.md"
LOG = ROOT / "benchmarks" / "LOG.md"
VERDICTS = ("right", "corrected", "cannot be held here", "not supported", "opinion")
REASONED = VERDICTS[1:]
"""Verdicts that must say why or how."""
TOLERANCE = 0.10
SUM = "python tests/docs/lecture_sums.py "

_CODE = re.compile(r"`([^`]+)`")
_COMPARISON = re.compile(
    r"(?P<said>.+?) → (?P<ours>.+?): (?P<relation>inside|holds|fails|[\d,.]+×)(?: \(±(?P<within>\d+)%\))?"
)
_AMOUNT = re.compile(r"(?P<low>\d[\d,.]*(?:e\d+)?)(?:–(?P<high>\d[\d,.]*(?:e\d+)?))? ?(?P<unit>\S.*)?")
_BYTES = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30}
_FIGURE = re.compile(r"(?P<value>[-+−]?\d.*?) = (?P<file>[\w.-]+): (?P<path>.+)")


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    said: str
    commands: list[str]
    tests: list[str]
    values: list[str]
    comparisons: list[str]
    measured: list[str]
    verdict: str
    line: str


def rows() -> list[Row]:
    """Every row of the page."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("| ") or cells[0] == "the lectures":
            continue
        assert len(cells) == 6, f"not six cells: {line}"
        how = _CODE.findall(cells[1])
        found.append(
            Row(
                said=cells[0],
                commands=[code for code in how if code.startswith(("meshwright ", SUM))],
                tests=[code for code in how if code.startswith("tests/")],
                values=_CODE.findall(cells[2]),
                comparisons=_CODE.findall(cells[3]),
                measured=_CODE.findall(cells[4]),
                verdict=cells[5],
                line=line,
            )
        )
    return found


def shows(text: str, value: str) -> bool:
    """Whether a text has a value as words of its own, whatever the spaces between them."""
    words = re.escape(" ".join(value.split())).replace(r"\ ", r"\s+")
    return re.search(rf"(?<![\w.,]){words}(?!\w|[.,]\d)", text) is not None


def renewed(text: str, value: str) -> str:
    """The value as the text has it now, found by its words; itself where it has none or they are not there."""
    if not re.search(r"[A-Za-z]", value):
        return value
    words = [re.sub(r"\\?[\d][\d\\.,]*", r"[\\d.,]*\\d", re.escape(word)) for word in value.split()]
    found = re.search(r"(?<![\w.,])" + r"\s+".join(words) + r"(?!\w|[.,]\d)", text)
    return " ".join(found.group().split()) if found else value


@dataclass(frozen=True)
class Comparison:
    """`32 GB → 29.92 GiB: 1.00×`: the lecture's number, ours, and how they relate.

    The lecture's may be a range (`2–4×`; then a ratio is to its nearer end, or `inside`) or a bound (`>10`, `<0.5%`;
    then `holds` or `fails`). `(±20%)` replaces the tolerance.
    """

    said: str
    ours: str
    relation: str
    within: float

    @classmethod
    def of(cls, text: str) -> "Comparison":
        """Read the notation."""
        found = _COMPARISON.fullmatch(text)
        assert found, f"`{text}` is not of the form `SAID → OURS: RELATION`"
        within = float(found["within"]) / 100 if found["within"] else TOLERANCE
        return cls(found["said"], found["ours"], found["relation"], within)

    def check(self) -> bool:
        """Whether ours agrees with the lecture's; the relation that is written must be the computed one."""
        low, high, unit = _amount(self.said.lstrip("<>"))
        ours, _, our_unit = _amount(self.ours)
        if unit in _BYTES and our_unit in _BYTES:
            low, high, ours = low * _BYTES[unit], high * _BYTES[unit], ours * _BYTES[our_unit]
        else:
            assert unit == our_unit, f"`{self.said}` and `{self.ours}` have different units"
        if self.said[0] in "<>":
            agrees = ours > low if self.said[0] == ">" else ours < low
            assert self.relation == ("holds" if agrees else "fails"), f"{self}: agrees is {agrees}"
            return agrees
        if low < high and low <= ours <= high:
            assert self.relation == "inside", f"{self}: it is inside"
            return True
        ratio = ours / (low if ours < low else high)
        digits = len(self.relation.rstrip("×").partition(".")[2])
        assert self.relation == f"{ratio:,.{digits}f}×", f"{self}: the ratio is {ratio:,.4f}"
        return abs(ratio - 1) <= self.within


def _amount(text: str) -> tuple[float, float, str]:
    found = _AMOUNT.fullmatch(text)
    assert found, f"`{text}` is not a number or a range with a unit"
    low = float(found["low"].replace(",", ""))
    return low, float((found["high"] or found["low"]).replace(",", "")), found["unit"] or ""


def number_of(text: str) -> str:
    """The digits of an amount, as they are written."""
    found = _AMOUNT.fullmatch(text)
    assert found, text
    return found["low"]


def verdict_of(cell: str) -> str:
    """The verdict's word; what follows a colon explains it."""
    word, _, reason = cell.partition(": ")
    assert word in VERDICTS, f"verdict `{word}` is none of {', '.join(VERDICTS)}"
    assert reason or word not in REASONED, f"`{cell}` does not say why"
    return word


def measured_holds(text: str) -> bool:
    """Whether `FIGURE = FILE: PATH` quotes what the file has there, in its unit and rounded as it is.

    FILE is a result without its date and `.json`, or LOG.md, whose path is the beginning of a heading. `A ÷ B` divides
    two entries of the same file; in B `…` stands for what A begins with.
    """
    found = _FIGURE.fullmatch(text)
    assert found, f"`{text}` is not of the form `FIGURE = FILE: PATH`"
    if found["file"] == LOG.name:
        return shows(log_section(found["path"]), found["value"])
    file = max(path.name for path in RESULTS.glob("*.json") if _undated(path) == found["file"])  # the newest
    above, _, below = found["path"].partition(" ÷ ")
    if not below:
        return holds(Figure(found["value"], file, above))
    if below.startswith("… / "):
        ending = below.split(" / ")[1:]
        below = " / ".join([*above.split(" / ")[: -len(ending)], *ending])
    table = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    digits = len(found["value"].partition(".")[2])
    return f"{look_up(table, above) / look_up(table, below):.{digits}f}" == found["value"]


def _undated(path: Path) -> str:
    return re.sub(r"^\d{4}-\d\d-\d\d-", "", path.stem)


def log_section(heading: str) -> str:
    """The text below the one heading of the log that begins so after its date."""
    parts = re.split(r"^#+ (?:\d{4}-\d\d-\d\d · )?", LOG.read_text(encoding="utf-8"), flags=re.MULTILINE)
    [section] = [part for part in parts if part.startswith(heading)]
    return section
