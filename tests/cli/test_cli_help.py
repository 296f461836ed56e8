"""Help comes without torch, and from a bare PYTHONPATH too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Cli

ROOT = Path(__file__).parents[2]


def test_help_imports_no_torch_from_a_bare_pythonpath(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['meshwright', '--help']\n"
        "from meshwright.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("data", "eval", "job", "checkpoint", "schedule", "train", "verify", "generate", "report", "doctor"):
        assert command in done.stdout


def test_python_m_meshwright(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "meshwright", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("meshwright ")


def test_a_torch_newer_than_tested_is_said_once_and_only_where_it_runs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.cli.version_of", lambda package: "2.115.0")
    assert cli("eval", "no-such-run").err.count("newer than 2.15, the newest release tested") == 1
    assert "newer than" not in cli("job", "check", "demo").err
    monkeypatch.setenv("RANK", "1")
    assert "newer than" not in cli("eval", "no-such-run").err
