"""The ledger of the lectures: every command is run and must print the values beside it; every test named must exist.

With REFRESH=1 values that have words with their number are written anew; bare numbers are left for a person.
"""

import io
import os
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "lectures.md"
CODE = re.compile(r"`([^`]+)`")
FIGURE = re.compile(r"^[+\d][\d.,%× ]*(?:MB|GB)?$")


@dataclass(frozen=True)
class Line:
    """One line of a table."""

    said: str
    commands: list[str]
    tests: list[str]
    values: list[str]
    measured: list[str]


def lines() -> list[Line]:
    found = []
    for row in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if not row.startswith("| ") or cells[0] == "the lectures":
            continue
        assert len(cells) == 5, f"not five columns: {row}"
        how = CODE.findall(cells[1])
        found.append(
            Line(
                cells[0],
                [code for code in how if code.startswith("meshwright ")],
                [code for code in how if code.startswith("tests/")],
                CODE.findall(cells[2]),
                CODE.findall(cells[3]),
            )
        )
    return found


LINES = lines()
COMMANDS = list(dict.fromkeys(command for line in LINES for command in line.commands))


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


def refresh(line: Line, text: str) -> None:
    rows = PAGE.read_text(encoding="utf-8").split("\n")
    place = next(number for number, row in enumerate(rows) if row.startswith(f"| {line.said} |"))
    for value in line.values:
        rows[place] = rows[place].replace(f"`{value}`", f"`{renewed(text, value)}`")
    PAGE.write_text("\n".join(rows), encoding="utf-8")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every command of the page prints, both streams, in this process: the planner then makes each model once.

    A refusal is an answer too, an internal error is none.
    """
    from meshwright.cli import main

    texts = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ledger"))
        patch.setenv("COLUMNS", "250")
        patch.setenv("MESHWRIGHT_PROFILES", "none")  # what was measured on this machine is no part of the page
        for command in COMMANDS:
            patch.setattr(sys, "argv", shlex.split(command))
            text, code = io.StringIO(), 0
            with redirect_stdout(text), redirect_stderr(text):
                try:
                    main()
                except SystemExit as stop:
                    code = int(stop.code or 0)
            texts[command] = text.getvalue()
            assert code in (0, 2) and "internal error" not in texts[command], f"{command}\n{texts[command]}"
    return texts


@pytest.mark.parametrize("line", [line for line in LINES if line.commands], ids=lambda line: line.said[:60])
def test_commands_print_the_values_beside_them(line: Line, printed: dict[str, str]) -> None:
    text = "\n".join(printed[command] for command in line.commands)
    missing = [value for value in line.values if not shows(text, value)]
    if missing and os.environ.get("REFRESH"):
        refresh(line, text)
    assert line.values and not missing, f"{missing} in none of what {line.commands} prints:\n{text}"


def test_every_line_has_an_answer_or_says_that_there_is_none() -> None:
    unanswered = [line.said for line in LINES if not line.commands and not line.tests]
    assert len(LINES) > 130 and len(unanswered) <= 5, unanswered


def test_every_test_named_is_there() -> None:
    missing = []
    for name in dict.fromkeys(test for line in LINES for test in line.tests):
        path, _, function = name.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not text or (function and f"def {function}(" not in text):
            missing.append(name)
    assert missing == []


def test_measured_figures_are_those_of_the_benchmarks() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    kept = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "benchmarks" / "LOG.md", *results])
    figures = [figure for line in LINES for figure in line.measured]
    assert len(figures) > 30 and [figure for figure in figures if not FIGURE.match(figure)] == []
    assert [figure for figure in figures if not shows(kept, figure)] == []


def test_a_drifted_value_would_be_seen() -> None:
    text = "weights                    29.91\nactivations 39.57 GiB, 66,445 tokens/s"
    assert shows(text, "weights 29.91") and shows(text, "66,445 tokens/s") and shows(text, "39.57")
    for wrong in ("weights 29.9", "weights 29.92", "6,445 tokens/s", "9.57", "66"):
        assert not shows(text, wrong)
