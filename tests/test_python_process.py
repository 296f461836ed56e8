"""Python processes that the product starts run no code of the working directory."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import meshwright
from meshwright.data.chat import ChatTemplate
from meshwright.data.conversations import Message
from meshwright.job import Job
from meshwright.launch import elastic
from meshwright.launch.ray.host import Host
from meshwright.launch.ray.record import Submission
from meshwright.measure.sweep import Sweep
from meshwright.python_process import python_command, python_variables
from meshwright.rehearse import apart
from meshwright.rehearse.apart import rehearse_apart
from meshwright.rehearse.rank import Settings
from meshwright.studio.planner_process import PlannerProcess

PACKAGE = Path(meshwright.__file__).parent
MARKED = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch(); raise ImportError('not the real one')\n"


class Started(Exception):
    """Instead of the process."""


class Start(NamedTuple):
    """What would have been started."""

    command: list[str]
    variables: Mapping[str, str]


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules named as those that every start imports."""
    folder = tmp_path / "poisoned"
    folder.mkdir()
    for name in ("json", "pydantic", "torch", "typer", "gc", "multiprocessing", "meshwright"):
        (folder / f"{name}.py").write_text(MARKED)
    monkeypatch.chdir(folder)
    return folder


def planner(folder: Path) -> None:
    PlannerProcess().start()


def sweep(folder: Path) -> None:
    list(Sweep("demo", (), [("run.steps=1",)], (), folder / "sweep.jsonl").run())


def ray_host(folder: Path) -> None:
    (folder / "ray").mkdir()
    Host(Submission("", str(folder), str(folder), 1, False, "")).start(0, (0, 1, "host:1"), 1)


def rehearsal(folder: Path) -> None:
    rehearse_apart(Job(), 0, 1, Settings(steps=1, warmup=0))


def elastic_ranks(folder: Path) -> None:
    (folder / "logs").mkdir()
    elastic.run_agent(Job(), folder, 2, ["train", "demo"])


def chat_renderer(folder: Path) -> None:
    ChatTemplate("{{ messages }}", {}, (), "a test").prompt([Message("user", "hello")])


@pytest.mark.parametrize("start", [planner, sweep, ray_host, rehearsal, elastic_ranks, chat_renderer])
def test_every_start_leaves_the_working_directory_out(
    start: Callable[[Path], None], tmp_path: Path, poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Start] = []

    def note(command: list[str], *_: Any, env: Mapping[str, str], **__: Any) -> None:
        starts.append(Start(command, env))
        raise Started

    def note_ranks(config: Any, python: str) -> Callable[..., None]:
        variables = {"RANK": "0"}
        config.logs_specs.reify({0: variables})
        return lambda *words: note([python, *words], env=variables)

    monkeypatch.setattr(subprocess, "run", note)
    monkeypatch.setattr(subprocess, "Popen", note)
    monkeypatch.setattr(elastic, "elastic_launch", note_ranks)
    for module in (elastic, apart):
        monkeypatch.setattr(module, "can_fork", lambda job: False)
    monkeypatch.setattr("meshwright.launch.ray.host.FOLDER", "ray")
    with pytest.raises(Started):
        start(tmp_path)
    [started] = starts
    assert started.command[:2] == [sys.executable, "-P"] and started.variables["PYTHONSAFEPATH"] == "1"
    assert str(PACKAGE.parent) in started.variables["PYTHONPATH"].split(os.pathsep)


def test_a_start_runs_nothing_of_the_working_directory(poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep)  # two empty entries, each the working directory to Python
    child = "subprocess.run([sys.executable, '-c', 'import json'], check=True)"  # as a library would start it
    code = f"import gc, json, meshwright, sys, subprocess; {child}"
    variables = {**os.environ, **python_variables()}
    done = subprocess.run(python_command("-c", code), env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr, list(poisoned.glob("*.ran"))) == (0, "", [])


def test_python_m_meshwright_runs_nothing_of_the_working_directory(poisoned: Path) -> None:
    (poisoned / "meshwright.py").unlink()  # Python itself looks for the program there first
    command = [sys.executable, "-m", "meshwright", "job", "schema"]
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    variables.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr, list(poisoned.glob("*.ran"))) == (0, "", [])


def test_no_other_file_starts_python() -> None:
    named = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "sys.executable" in path.read_text()
    }
    assert named == {"python_process.py", "hardware/doctor.py"}  # the latter prints it


TORCH = "import os; print(os.environ.get('OMP_WAIT_POLICY'), flush=True); os._exit(0)\n"
"""A torch that prints how OpenMP's threads would wait, which the real one's OpenMP reads when it is loaded."""
PROGRAM = "import meshwright; meshwright.verify"
STARTS = [
    ["-m", "meshwright", "train", "demo"],
    ["-m", "meshwright.launch.elastic"],
    ["-c", PROGRAM],
    ["-c", apart._PROGRAM],
]
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_policy(folder: Path, start: list[str], variables: dict[str, str]) -> str:
    """What OMP_WAIT_POLICY is at the moment when a Python process imports torch."""
    (folder / "torch.py").write_text(TORCH)
    path = os.pathsep.join([str(folder), str(PACKAGE.parent)])
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    environment |= {"PYTHONPATH": path, "XDG_CACHE_HOME": str(folder)} | variables
    done = subprocess.run(python_command(*start), env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("start", STARTS, ids=["command", "module", "program", "rehearsal"])
def test_threads_that_wait_sleep_from_the_moment_torch_is_loaded(start: list[str], tmp_path: Path) -> None:
    assert wait_policy(tmp_path, start, {}) == "PASSIVE"


@pytest.mark.parametrize(
    ("variables", "policy"),
    [({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "1000"}, "None"), ({"KMP_BLOCKTIME": "1"}, "None")],
)
def test_how_threads_wait_is_the_users_if_they_have_set_it(
    variables: dict[str, str], policy: str, tmp_path: Path
) -> None:
    assert wait_policy(tmp_path, ["-c", PROGRAM], variables) == policy
