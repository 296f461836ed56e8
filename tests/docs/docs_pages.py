"""The guide's pages as tests see them: shell and Python blocks with the output shown after them, pictures, figures.

A ```text block right after a ```bash or ```python block is what that block prints. A page's Python blocks run in order
in one process, its shell blocks in order in one folder. An ellipsis stands for what differs from machine
to machine: "…" on a line of its own for any lines, inside a line for any text of it. A picture NAME.svg of the playbook
is written by a command of its page. A table row that ends in `FILE.json`: `PATH` quotes a measurement before it.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLAYBOOK = [page for page in GUIDE if page.parent == ROOT / "docs" / "playbook"]
RESULTS = ROOT / "benchmarks" / "results"
REFRESH = bool(os.environ.get("REFRESH"))
"""Write what commands print into the pages instead of failing: `make refresh-docs`."""

_REST = r"\n(?P<command>.*?)^```$(?:\n+```text\n(?P<shown>.*?)^```$)?"
_BLOCK = re.compile(r"^```(?:bash|sh|shell|console)" + _REST, re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```(?:python|py|pycon)" + _REST, re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+\.svg)\)")
_MEASURED = re.compile(
    r"^\|.*\| *(?P<value>[^|]+?) *\| *`(?P<file>[\w.-]+\.json)`: `(?P<path>[^`]+)` *\|$", re.MULTILINE
)
_NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.(\d+))?")
_UNITS = {"GiB": 2.0**-30, "MB": 1e-6, "%": 100.0}


@dataclass(frozen=True)
class Block:
    """A block, and what the page shows of its output, if it does, with where that stands in the page."""

    command: str
    shown: str | None
    span: tuple[int, int]


def blocks(text: str, kind: re.Pattern[str] = _BLOCK) -> list[Block]:
    """A page's shell blocks, in order."""
    return [Block(found["command"].strip(), found["shown"], found.span("shown")) for found in kind.finditer(text)]


def python_blocks(text: str) -> list[Block]:
    """A page's Python blocks, in order."""
    return blocks(text, _PYTHON)


def pictures(text: str) -> list[str]:
    """The SVG files a page shows."""
    return _PICTURE.findall(text)


def run_page(page: Path, folder: Path, cache: Path, commands: list[Path]) -> None:
    """Run every block in `folder`, as a reader would, and hold shown text and pictures to what comes out.

    Make targets are only resolved (`make -n`): they are the demo and this very test suite.
    """
    environment = _environment(folder, cache, commands)
    text = page.read_text(encoding="utf-8")
    _hold(page, text, [(block, _printed(page, block.command, folder, environment)) for block in blocks(text)])
    if page in PLAYBOOK:
        _check_pictures(page, folder)


def run_python(page: Path, folder: Path, cache: Path, python: Path) -> None:
    """Run a page's Python blocks in one process, in `folder`, and hold shown text to what they print."""
    text = page.read_text(encoding="utf-8")
    found = python_blocks(text)
    (folder / "blocks.json").write_text(json.dumps([block.command for block in found]), encoding="utf-8")
    done = subprocess.run(
        [python, Path(__file__).with_name("run_blocks.py"), page.name, "blocks.json", "printed.json"],
        cwd=folder,
        env=_environment(folder, cache, []),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    printed = json.loads((folder / "printed.json").read_text(encoding="utf-8"))
    _hold(page, text, list(zip(found, map(_trimmed, printed), strict=True)))


def _environment(folder: Path, cache: Path, commands: list[Path]) -> dict[str, str]:
    (folder / "docs").symlink_to(ROOT / "docs")  # the guide speaks from the checkout
    return {
        **os.environ,
        "PATH": os.pathsep.join([*map(str, commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "XDG_CACHE_HOME": str(cache),
        "MESHWRIGHT_PROFILES": str(folder / "profiles"),  # empty: plans use what ships, not this machine's
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",  # what commands print must not depend on who runs them
        "LC_ALL": "C.UTF-8",
    }


def _hold(page: Path, text: str, printed: list[tuple[Block, str]]) -> None:
    """Compare what blocks print with what the page shows; with REFRESH write it there."""
    fresh = text
    for block, output in reversed(printed):
        if block.shown is not None and not matches(block.shown, output):
            told = f"{page.name} shows\n{block.shown}\nbut\n{block.command}\nprints\n{output}"
            assert REFRESH, f"{told}\n`make refresh-docs` writes that into the page"
            assert "…" not in block.shown, f"{told}\nand where its ellipsis belongs now is for a person to say"
            fresh = fresh[: block.span[0]] + output + fresh[block.span[1] :]
    if fresh != text:
        page.write_text(fresh, encoding="utf-8")


def _printed(page: Path, command: str, folder: Path, environment: dict[str, str]) -> str:
    script = re.sub(r"^make ", f"make -n -C '{ROOT}' ", command, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{page.name}:\n{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return _trimmed(done.stdout)


def _trimmed(text: str) -> str:
    """Without the blanks that tables have at the ends of lines, and editors do not keep."""
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def matches(shown: str, output: str) -> bool:
    """Whether `shown` is the output, ellipses standing for anything."""
    lines = [
        r"(?:[^\n]*\n)*?" if line == "…" else "[^\n]*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in shown.splitlines()
    ]
    return re.fullmatch("".join(lines), output) is not None


def _check_pictures(page: Path, folder: Path) -> None:
    for name in pictures(page.read_text(encoding="utf-8")):
        made, kept = folder / Path(name).name, page.parent / name
        assert made.is_file(), f"{page.name}: no command on the page writes {made.name}"
        if REFRESH and (not kept.is_file() or kept.read_text() != made.read_text()):
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(made.read_text())
        assert kept.read_text() == made.read_text(), (
            f"{page.name}: its commands write another {made.name}; `make refresh-docs` takes that one"
        )


@dataclass(frozen=True)
class Figure:
    """A measured figure as a page quotes it."""

    value: str
    file: str
    path: str


def measured(text: str) -> list[Figure]:
    """The figures a page quotes from results."""
    return [Figure(found["value"], found["file"], found["path"]) for found in _MEASURED.finditer(text)]


def holds(figure: Figure) -> bool:
    """Whether the quoted figure, in its unit and rounded as it is, is the one in its file."""
    value = look_up(json.loads((RESULTS / figure.file).read_text(encoding="utf-8")), figure.path)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return figure.value == str(value).replace("-", "−")
    found = _NUMBER.match(figure.value)
    assert found, f"{figure.value} has no number"
    unit = figure.value[found.end() :].split()[:1]
    if unit and unit[0] in _UNITS and (unit[0] == "%" or "bytes" in figure.path):
        value *= _UNITS[unit[0]]
    quoted = float(found[0].replace(",", "").replace("−", "-"))
    return round(value, len(found[1] or "")) == quoted


def look_up(value: Any, path: str) -> Any:
    """`a / b=c; d=e / f`: by name in a table; in a list, the one entry that has these values."""
    for step in path.split(" / "):
        if isinstance(value, list):
            wanted = dict(part.split("=", 1) for part in step.split("; "))
            [value] = [entry for entry in value if all(str(entry[key]) == one for key, one in wanted.items())]
        else:
            value = value[step]
    return value


def figures() -> Iterator[tuple[Path, Figure]]:
    """Every figure of every page."""
    for page in GUIDE:
        for figure in measured(page.read_text(encoding="utf-8")):
            yield page, figure
