"""Shared by all rooms: the command line run in this process, a small corpus, a small job."""

import atexit
import contextlib
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from command import Cli, CommandResult

# Before anything loads torch: a rank forked from a process whose OpenMP has threads waits for them for ever.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests have cache folders of their own, but share what is compiled.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "meshwright-tests-compiled"))
# Their kernels run a few times on small tensors: without vector instructions g++ needs half the time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# A busy machine draws slowly and computes late; neither is a fault of what is tested.
hypothesis.settings.register_profile("no clock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("no clock")
gc.disable()  # until all tests are collected, see below


@pytest.fixture(autouse=True)
def precision_of_products() -> Iterator[None]:
    """A run on a GPU allows TF32 for its whole process: not for the tests after it."""
    torch = sys.modules.get("torch")
    before = torch.get_float32_matmul_precision() if torch else "highest"
    yield
    if torch := sys.modules.get("torch"):
        torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled_is_left() -> Iterator[None]:
    """What one file's tests compile makes the compiler treat other shapes of the same code otherwise, in forked ranks
    too: not those of the files after it."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("train", "job.toml", …)` in an empty folder with its own data cache."""
    from meshwright.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return CommandResult(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def warm_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for PATH whose `meshwright`, and `python-warm`, run in forks of a server that has imported torch.

    In its folder `python` the latter is called `python`.
    """
    folder, warm = tmp_path_factory.mktemp("warm"), Path(__file__).parent / "warm"
    (folder / "python").mkdir()
    for name, first in (("meshwright", ""), ("python-warm", "--python "), ("python/python", "--python ")):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {warm}/client.py {folder}/socket {first}"$@"\n')
        command.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, warm / "server.py", folder / "socket"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    yield folder
    server.stdin.close()
    assert server.wait(timeout=120) == 0  # longer only than a busy machine takes


@pytest.fixture
def warm_python(warm_command: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that has imported torch; what this process starts by `sys.executable` runs in it too."""
    python = warm_command / "python-warm"
    monkeypatch.setattr(sys, "executable", str(python))
    return python


TINY_JOB = """
[model]
preset = "tiny-llama"

[data]
sources = ["corpus"]
validation_fraction = 0.2
workers = 0

[batch]
sequence_length = 32
global_batch = 4
micro_batch = 2

[optimizer]
lr = 1e-2

[evaluation]
every_steps = 5
batches = 2
sample_tokens = 8

[run]
steps = 10
device = "cpu"
folder = "run"
"""


@pytest.fixture
def tiny_job(tmp_path: Path) -> Path:
    """A job file beside a corpus of 60 small documents, in the folder the `cli` fixture runs in."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(60):
        lines = [f"def add_{number}(a, b):", f'    """Add {number} to the sum."""', f"    return a + b + {number}", ""]
        (corpus / f"module_{number:02}.py").write_text("\n".join(lines * 4))
    path = tmp_path / "job.toml"
    path.write_text(TINY_JOB)
    return path


LONGEST = (
    "layouts/test_layouts_matrix.py",
    "launch/test_launch_slurm.py",
    "docs/test_docs_commands.py",
    "launch/test_launch_ray.py",
)
"""Files of minutes."""
SHORTEST = ("job", "layout", "pipeline", "plan", "reading")
"""Rooms of many short files."""


def _turn(item: pytest.Item) -> int:
    """A file runs in one process: a long one that came last would be waited for by all others."""
    name = item.path.relative_to(Path(__file__).parent).as_posix()
    return LONGEST.index(name) if name in LONGEST else len(LONGEST) + (name.partition("/")[0] in SHORTEST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first. Tests marked gpu run where a GPU is and are left out, by count, elsewhere."""
    import torch

    items.sort(key=_turn)
    if torch.cuda.device_count() > 0:
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


FROZEN = contextlib.ExitStack()
atexit.register(FROZEN.close)


def pytest_collection_finish() -> None:
    """What all tests have imported is not garbage: every run collects once before its first step, and a collection that
    visited a million objects would take longer than most of these runs."""
    from meshwright.train.garbage import frozen

    gc.collect()
    FROZEN.enter_context(frozen())
    gc.enable()


_modules = 0
"""How many were imported when what is imported was frozen last."""


@pytest.fixture(autouse=True)
def later_imports_are_frozen_too() -> None:
    """What earlier tests have imported, such as the compiler, is no garbage either, here and in forks."""
    global _modules
    if len(sys.modules) > _modules + 100:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()
