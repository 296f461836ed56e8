"""Every shell block of the README and the guide runs, in order, as a reader would run it, and prints what is shown.

But for the pages in COLD, `meshwright` and `python` are forked from a process that has imported torch, with a smaller
`builtin:stdlib`.
"""

from pathlib import Path

import pytest
from docs_pages import GUIDE, PLAYBOOK, ROOT, blocks, run_page

COLD = {"data", "job"}
README = ROOT / "README.md"
REST = [pytest.param(page, marks=pytest.mark.thorough) for page in GUIDE if page not in PLAYBOOK and page != README]


@pytest.mark.parametrize("page", [README, *REST], ids=lambda page: page.stem)
def test_the_page_s_commands_run(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm_command: Path
) -> None:
    cache = tmp_path_factory.getbasetemp() / "docs-cache"  # one for all pages
    run_page(page, tmp_path, cache, [] if page.stem in COLD else [warm_command, warm_command / "python"])


def test_the_readme_shows_its_two_commands() -> None:
    commands = [block.command for block in blocks(README.read_text(encoding="utf-8"))]
    lines = [line.partition("#")[0].strip() for command in commands for line in command.splitlines()]
    assert {"make demo", "make test"} <= set(lines)
