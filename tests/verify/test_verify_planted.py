"""The list of planted bugs cannot rot: texts are there once, checks exist, the guide shows it, other ends are no catch.

That each bug is caught takes minutes: `scripts/planted-bugs` plants them all.
"""

import shlex
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshwright.job import load_job
from meshwright.verify import load_matrix

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "planted-bugs"


def _load() -> ModuleType:
    loader = SourceFileLoader("planted_bugs", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # its dataclasses look themselves up there
    loader.exec_module(module)
    return module


planted: Any = _load()
BUGS = planted.load()


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_bug_can_be_planted_and_is_a_program(bug: Any, tmp_path: Path) -> None:
    target = tmp_path / bug.file
    target.parent.mkdir(parents=True)
    target.write_text((ROOT / bug.file).read_text(encoding="utf-8"), encoding="utf-8")
    bug.plant(tmp_path)
    compile(target.read_text(encoding="utf-8"), bug.file, "exec")
    assert bug.planted != bug.text and bug.shows


@pytest.mark.parametrize("content", ["b", "a a"])
def test_a_text_that_is_not_there_once_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(content)
    with pytest.raises(ValueError, match=rf"occurs {content.count('a')} times in x\.py, not once"):
        planted.Bug("a bug", "x.py", "a", "b", "verify demo", "gradient").plant(tmp_path)


def test_there_are_enough_in_every_room() -> None:
    rooms = Counter(bug.room for bug in BUGS)
    assert sum(rooms.values()) >= 32 and len({bug.name for bug in BUGS}) == len(BUGS)
    assert {room for room, count in rooms.items() if count >= 5} >= {"data", "train", "parallel", "checkpoint", "model"}


def test_every_check_that_is_named_exists() -> None:
    """Without collecting tests, which would import all that they use."""
    lines = {matrix: [line.name for line in load_matrix(matrix)] for matrix in ("quick", "full")}
    for check in dict.fromkeys(bug.check for bug in BUGS):
        kind, *given = shlex.split(check)
        if kind == "pytest":
            path, _, node = given[0].partition("::")
            test, _, case = node.removesuffix("]").partition("[")
            source = (ROOT / path).read_text(encoding="utf-8")
            assert not node or (f"\ndef {test}(" in source and case in source), check
        elif "--matrix" in given:
            assert given[0] == "--matrix" and given[2] == "--only", check
            assert any(given[3] in name for name in lines[given[1]]), check
        else:
            job, *overrides = given
            assert load_job(job, [word for word in overrides if not word.startswith("--")]), check


def test_the_guide_shows_the_list() -> None:
    page = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    assert planted.table(BUGS) in page, "scripts/planted-bugs --table prints what belongs into docs/verify.md"


BUG = planted.Bug("a bug", "meshwright/model/x.py", "a", "b", "verify demo", "gradient of embed.weight")
NOT_EQUAL = (
    "NOT EQUAL  1.0e-01    2.0 s  llama\n           first difference: gradient of embed.weight, off by 1.0e-01\n"
)
CRASH = "failed     llama\nrank 1 failed:\nTraceback (most recent call last):\n  x\n{}: no gradient of embed.weight\n"
ENDS = {
    "it diverges": (1, NOT_EQUAL, True),
    "a job diverges": (1, "not equal: first difference is the gradient of embed.weight, off by 1.0e-01\n", True),
    "a rank fails": (1, CRASH.format("RuntimeError"), True),
    "a job's rank fails": (1, CRASH.format("RuntimeError").replace("failed     llama\n", "meshwright: "), True),
    "its collectives do not fit": (1, "equal  x\n           collectives: no gradient of embed.weight\n", True),
    "it passes": (0, "1 of 1 layouts equal (2 s)\n", False),
    "it diverges elsewhere": (1, NOT_EQUAL.replace("embed", "head"), False),
    "the planted text does not run": (1, CRASH.format("NameError"), False),
    "the package cannot be imported": (1, "Traceback (most recent call last):\nImportError: x\n", False),
    "the check is no command": (2, 'meshwright: --only "x" matches no layout\'s name\n', False),
}


@pytest.mark.parametrize("end", ENDS)
def test_only_the_failure_that_is_expected_is_a_catch(end: str) -> None:
    code, output, caught = ENDS[end]
    assert planted.judge(planted.Task(BUG.check, BUG), code, output)[0] is caught


@pytest.mark.parametrize(
    ("code", "summary", "caught"),
    [
        (1, "FAILED tests/x.py::test_y - AssertionError: gradient of embed.weight", True),
        (1, "ERROR tests/x.py::test_y - AssertionError: gradient of embed.weight", False),
        (1, "FAILED tests/x.py::test_y - NameError: gradient of embed.weight", False),
        (2, "ERROR tests/x.py - ImportError: gradient of embed.weight", False),
        (4, "ERROR: not found: tests/x.py::test_y", False),
        (0, "1 passed in 0.1s", False),
    ],
)
def test_only_a_failed_assertion_is_a_catch(code: int, summary: str, caught: bool) -> None:
    task = planted.Task("pytest tests/x.py::test_y", BUG)
    assert planted.judge(task, code, f"F\n=== short test summary info ===\n{summary}\n")[0] is caught


def test_without_a_bug_a_check_must_pass() -> None:
    assert planted.judge(planted.Task("verify demo"), 0, "equal\n") == (True, "equal")
    assert planted.judge(planted.Task("verify demo"), 1, NOT_EQUAL)[0] is False


def test_make_test_catches_nine_bugs_of_ten() -> None:
    commands = Counter(planted.command(bug.check) for bug in BUGS)
    assert commands["test"] >= 0.9 * len(BUGS), commands


def test_a_sample_has_bugs_of_every_third_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["planted-bugs", "--sample", "3"])
    monkeypatch.setattr(planted, "warm_up", lambda: None)
    monkeypatch.setattr(planted, "results", lambda planned, jobs, timeout_s: tasks.extend(planned) or [])
    assert planted.main() == 0
    starts = (0, len(BUGS) // 3, 2 * len(BUGS) // 3)
    assert [task.bug.name for task in tasks] == [BUGS[number].name for number in starts]
