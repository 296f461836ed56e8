"""Every shell block of the README and the guide runs, in order, as a reader would run it.

But for the pages in COLD, `meshwright` is forked from a process that has imported torch, with a smaller
`builtin:stdlib`; the sweep on the page about benchmarks starts processes of its own and reads all of it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COLD = {"data", "job"}
BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    return [block.strip() for block in BLOCK.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_s_commands_run(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm_command: Path
) -> None:
    """Make targets are only resolved (`make -n`): they are the demo and this very test suite."""
    folders = [Path(sys.executable).parent] if page.stem in COLD else [warm_command, Path(sys.executable).parent]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
        "XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "docs-cache"),  # one for all pages
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # the guide speaks from the checkout
    for block in commands(page):
        script = re.sub(r"^make ", f"make -n -C '{ROOT}' ", block, flags=re.MULTILINE)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{page.name}:\n{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_readme_shows_its_two_commands() -> None:
    lines = [line.partition("#")[0].strip() for block in commands(ROOT / "README.md") for line in block.splitlines()]
    assert {"make demo", "make test"} <= set(lines)
