"""docs/architecture.md: its sentence for each file is the file's own, and no file is left out."""

import ast
import os
import re

import pytest
from docs_pages import ROOT

PAGE = ROOT / "docs" / "architecture.md"
ROOMS = ("api", "train", "runs", "launch", "parallel", "data")


def sentences(room: str) -> str:
    """A table of a room's files with the first sentence of each docstring."""
    rows = ["| file | what it is |", "|---|---|"]
    for path in sorted((ROOT / "meshwright" / room).rglob("*.py")):
        if path.name == "__init__.py":
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring, f"{path} says nothing of itself"
        first = " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")
        rows.append(f"| `{path.relative_to(ROOT / 'meshwright')}` | {first} |")
    return "\n".join(rows)


@pytest.mark.parametrize("room", ROOMS)
def test_the_page_says_of_every_file_what_the_file_says(room: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = re.search(rf"^### {room}\n\n(.*?)\n(?=\n### |\Z)", text, re.DOTALL | re.MULTILINE)
    assert shown, f"{PAGE.name} has no place for the files of {room}"
    if os.environ.get("REFRESH") and shown[1] != sentences(room):
        PAGE.write_text(text.replace(shown[1], sentences(room)), encoding="utf-8")
        return
    assert shown[1] == sentences(room), "run make refresh-docs"
