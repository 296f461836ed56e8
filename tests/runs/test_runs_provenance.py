"""The code a run records, in a checkout whose .git a stranger has written."""

import subprocess
from pathlib import Path

import pytest

from meshwright.runs.provenance import describe_code


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one changed file."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (folder / "train.py").write_text("a = 2\n")
    return folder


def git(*words: str) -> None:
    subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *words], check=True)


def script(path: Path) -> str:
    """A program that leaves tmp_path/ran and copies its input."""
    path.write_text(f"#!/bin/sh\ntouch {path.parent / 'ran'}\nexec cat\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("setting", "attributes"),
    [
        ("core.fsmonitor", ""),
        ("diff.external", ""),
        ("diff.planted.textconv", "*.py diff=planted"),
        ("diff.planted.command", "*.py diff=planted"),
        ("filter.planted.clean", "*.py filter=planted"),
        ("filter.planted.process", "*.py filter=planted"),
        ("core.hooksPath", ""),
    ],
)
def test_no_command_in_a_checkouts_settings_runs(checkout: Path, setting: str, attributes: str) -> None:
    program = script(checkout.parent / "post-index-change")
    git("config", setting, str(checkout.parent) if setting == "core.hooksPath" else program)
    (checkout / ".gitattributes").write_text(attributes)
    (checkout / ".git" / "info" / "attributes").write_text(attributes)
    code, diff = describe_code()
    assert not (checkout.parent / "ran").exists()
    assert code["working_directory"]["dirty"] is True and "+a = 2" in diff


def test_no_hook_of_a_checkout_runs(checkout: Path) -> None:
    (checkout / ".git" / "hooks").mkdir(exist_ok=True)
    for name in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
        (checkout / ".git" / "hooks" / name).write_text(f"#!/bin/sh\ntouch {checkout.parent / 'ran'}\n")
        (checkout / ".git" / "hooks" / name).chmod(0o755)
    (checkout / "train.py").write_text("a = 1\n")  # unchanged after all, which would refresh git's index
    assert describe_code()[0]["working_directory"]["dirty"] is False
    assert not (checkout.parent / "ran").exists()


def test_no_command_in_the_settings_of_a_submodule_runs(checkout: Path) -> None:
    inner = checkout / "inner"
    inner.mkdir()
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        git("-C", str(inner), *words)
    git("add", "inner")
    git("commit", "-q", "-m", "second")
    git("-C", str(inner), "config", "core.fsmonitor", script(checkout.parent / "program"))
    (inner / "new.py").write_text("")
    code, diff = describe_code()
    assert not (checkout.parent / "ran").exists()
    assert code["working_directory"]["commit"] and "+a = 2" in diff


def test_files_outside_a_checkout_are_not_recorded(checkout: Path) -> None:
    """The settings of a checkout may name any other folder as the one it tracks."""
    (checkout.parent / "train.py").write_text("secret = 1\n")
    git("config", "core.worktree", str(checkout.parent))
    code, diff = describe_code()
    assert code["working_directory"] is None and "secret" not in diff


def test_a_folder_inside_a_linked_checkout_is_recorded_without_what_is_excluded(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / ".git" / "info" / "exclude").write_text("runs/\n")
    git("worktree", "add", "-q", str(checkout.parent / "linked"))
    folder = checkout.parent / "linked" / "runs"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    (folder.parent / "new.py").write_text("")
    monkeypatch.chdir(folder)
    recorded = describe_code()[0]["working_directory"]
    assert recorded["root"] == str(checkout.parent / "linked") and recorded["untracked"] == ["new.py"]


def test_changes_that_git_cannot_read_are_recorded_as_unknown(checkout: Path) -> None:
    (checkout / ".git" / "index").write_bytes(b"no index")
    code, diff = describe_code()
    assert code["working_directory"]["dirty"] is None and "train.py" not in diff
