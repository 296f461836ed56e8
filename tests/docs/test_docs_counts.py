"""Numbers that the README states about the repository are those of its files."""

import re

from docs_pages import ROOT

from meshwright.job import model_presets
from meshwright.pipeline import SCHEDULES
from meshwright.verify.matrix import load_matrix

README = (ROOT / "README.md").read_text(encoding="utf-8")
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def number(pattern: str) -> int:
    found = re.search(pattern, README)
    assert found, f"the README has nothing like {pattern}"
    return NAMES.index(found[1]) if found[1] in NAMES else int(found[1])


def test_the_layouts_of_the_matrix() -> None:
    lines = load_matrix()
    kinds = {re.split("[ ,]", line.name)[0] for line in lines}
    assert number(r"the matrix has (\d+) layouts") == len(lines)
    assert number(r"layouts of (\d+) model kinds") == len(kinds)
    assert number(r"(\d+) of them mixtures of experts") == sum(line.job.model.experts is not None for line in lines)


def test_presets_and_schedules() -> None:
    assert number(r"(\d+) public shapes by name") == sum(not name.startswith("tiny-") for name in model_presets())
    assert number(r"pipelines with (\w+) schedules") == len(SCHEDULES)
