"""Help is whole, and it and plans come without torch, from a bare PYTHONPATH too."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command import Cli

from meshwright.cli import app

ROOT = Path(__file__).parents[2]


def run_without(modules: set[str], arguments: list[str], folder: Path) -> str:
    """What a command prints from a bare PYTHONPATH, held not to have imported some modules."""
    code = (
        f"import sys; sys.argv = ['meshwright', *{arguments}]\n"
        "from meshwright.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        f"assert not {modules} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_imports_no_torch_from_a_bare_pythonpath(tmp_path: Path) -> None:
    shown = run_without({"torch", "pydantic", "numpy", "rich"}, ["--help"], tmp_path)
    for command in ("data", "eval", "job", "checkpoint", "schedule", "train", "verify", "generate", "report", "doctor"):
        assert command in shown


def test_a_plan_imports_no_torch(tmp_path: Path) -> None:
    asked = ["plan", "--model", "llama-3-8b", "--cluster", "8xh100", "--top", "1"]
    assert "dp" in run_without({"torch", "transformers", "pyarrow"}, asked, tmp_path)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


def test_help_says_all_that_was_written(cli: Cli) -> None:
    """Every word of every help text and docstring, what stands in brackets included."""
    bracketed = 0
    for path, command in commands(typer.main.get_command(app)):
        shown = "".join(cli(*path, "--help").out.split())
        texts = [command.help, *(parameter.help for parameter in command.params)]
        for text in (text for text in texts if text):
            assert "".join(text.split()) in shown, (path, text)
            bracketed += "[" in text
    assert bracketed  # or the test proves nothing


def test_python_m_meshwright(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "meshwright", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("meshwright ")


def test_a_torch_newer_than_tested_is_said_once_and_only_where_it_runs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.115.0")
    assert cli("eval", "no-such-run").err.count("newer than 2.15, the newest release tested") == 1
    assert "newer than" not in cli("job", "explain", "demo").err
    monkeypatch.setenv("RANK", "1")
    assert "newer than" not in cli("eval", "no-such-run").err
