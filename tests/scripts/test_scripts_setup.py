"""What scripts/setup decides: what is installed, which build of torch, and what it says. Python and pip are fakes."""

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_machine import Machine
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CPU, CUDA = "2.13.0+cpu for CPUs", "2.13.0 for CUDA 13.0"
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"

# A Python that knows just what setup asks of it. The torch it has is in a file beside it; `venv` makes another one.
# Its pip writes down its call and constraint, and installs a CUDA build where the constraint excludes the other.
PYTHON = f"""
case "$*" in
  *sys.version_info*) exit 0 ;;
  *importlib.metadata*) [ ! -f "$0.torch" ] || echo "$(<"$0.torch")" ;;
  "-m venv"*)
    echo "$*" >> calls
    venv="${{@: -1}}"
    mkdir -p "$venv/bin"
    cp "$0" "$venv/bin/python"
    if [[ $* = *--system-site-packages* ]]; then cp "$0.torch" "$venv/bin/python.torch"; fi
    : > "$venv/pip"
    echo '#!/bin/sh' > "$venv/bin/meshwright"
    echo 'echo meshwright 1.0' >> "$venv/bin/meshwright"
    chmod +x "$venv/bin/meshwright" ;;
  "-m pip --version") test -f "${{0%/bin/*}}/pip" ;;
  "-m pip config list") echo "${{PIP_SETTINGS:-}}" ;;
  "-m pip install"*)
    test -f "${{0%/bin/*}}/pip" || exit 1
    while [ "$1" != -c ]; do flags="${{flags:-}} $1"; shift; done
    torch="$(<"$2")"
    torch="${{torch##*[[:space:]]}}"
    echo "$flags ${{@:3}} | $torch" >> calls
    case "$torch" in
      *!=*) echo "{CUDA}" > "$0.torch" ;;
      *) [ -f "$0.torch" ] || echo "{CPU}" > "$0.torch" ;;
    esac
    [ -z "${{PIP_FAILS:-}}" ] ;;
  *) exit 9 ;;
esac"""


class Checkout:
    """A checkout's files for setup, on a machine of fakes without a GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.machine = folder, Machine(folder, ())
        (folder / "scripts").mkdir()
        self.script = folder / "scripts/setup"
        shutil.copy(ROOT / "scripts/setup", self.script)
        (folder / "pyproject.toml").touch()
        (folder / "constraints.txt").write_text("# which torch\ntorch==2.13.0\n")
        for name in ("pyproject.toml", "constraints.txt"):
            os.utime(folder / name, (0, 0))
        self.machine.real("dirname", "grep", "mktemp", "rm", "cp", "mkdir", "chmod")
        self.machine.fake("python3", PYTHON)
        self.machine.fake("nvidia-smi", "exit 9")

    def gpu_appears(self) -> None:
        self.machine.fake("nvidia-smi", "exit 0")

    def machine_has(self, torch: str) -> None:
        (self.machine.folder / "python3.torch").write_text(torch)

    def setup(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        done = self.machine.run(self.script, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done

    def calls(self) -> list[str]:
        """What was asked of Python since the last call of this: environments made, packages installed."""
        path = self.folder / "calls"
        calls = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return calls

    def torch(self) -> str:
        return (self.folder / ".venv/bin/python.torch").read_text().strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def packages(calls: list[str]) -> list[str]:
    """What pip was to install, call by call."""
    installs = [call.partition(" | ")[0].split() for call in calls if "install" in call]
    return [" ".join(word for word in words if word in ("torch", ".", ".[dev]")) for words in installs]


def constraints(calls: list[str]) -> list[str]:
    """Which torch pip was allowed, call by call."""
    return [call.partition(" | ")[2] for call in calls if "install" in call]


def test_the_demo_installs_what_running_needs_and_the_tests_add_the_rest(checkout: Checkout) -> None:
    checkout.setup()
    assert packages(checkout.calls()) == ["torch", "."]
    checkout.setup()
    assert checkout.calls() == []
    checkout.setup("--dev")
    added = checkout.calls()
    assert packages(added) == ["torch", ".[dev]"] and not any("venv" in call for call in added)
    for arguments in ((), ("--dev",)):
        assert checkout.setup(*arguments).stdout == ""
    assert checkout.calls() == []


def test_what_the_tests_need_is_enough_for_the_demo(checkout: Checkout) -> None:
    checkout.setup("--dev")
    checkout.calls()
    checkout.setup()
    assert checkout.calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_what_is_needed_is_installed(checkout: Checkout, name: str) -> None:
    checkout.setup()
    checkout.calls()
    os.utime(checkout.folder / name, (2**32, 2**32))
    checkout.setup()
    assert packages(checkout.calls()) == ["torch", "."]


def test_a_setup_that_failed_is_not_taken_for_done(checkout: Checkout) -> None:
    assert checkout.machine.run(checkout.script, PIP_FAILS="yes").returncode != 0
    checkout.calls()
    checkout.setup()
    assert packages(checkout.calls()) == ["torch", "."]


def test_each_step_is_a_line_where_nobody_watches(checkout: Checkout) -> None:
    assert checkout.setup().stdout.splitlines() == [
        "setup: making .venv",
        "setup: installing torch==2.13.0",
        "setup: installing meshwright and what it runs with",
        f"setup: meshwright 1.0 with torch {CPU}",
    ]
    assert all(" -q" in call for call in checkout.calls() if "install" in call)


def test_pip_shows_its_bar_on_a_terminal(checkout: Checkout) -> None:
    ours, terminal = pty.openpty()
    command = [str(shutil.which("bash")), str(checkout.script)]
    done = subprocess.run(command, env={"PATH": str(checkout.machine.folder)}, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.close(ours)
    calls = checkout.calls()
    assert done.returncode == 0 and packages(calls) == ["torch", "."] and not any("-q" in call for call in calls)


def test_without_a_gpu_the_cpu_build_is_downloaded_unless_pip_has_indexes_of_its_own(checkout: Checkout) -> None:
    checkout.setup()
    torch, rest = [call for call in checkout.calls() if "install" in call]
    assert CPU_INDEX in torch and "index" not in rest
    shutil.rmtree(checkout.folder / ".venv")
    checkout.setup(PIP_SETTINGS="global.extra-index-url='https://mirror.example/simple'")
    assert not any("index" in call for call in checkout.calls())


def test_with_a_gpu_a_cuda_build_is_installed(checkout: Checkout) -> None:
    checkout.gpu_appears()
    done = checkout.setup("--dev")
    assert done.stdout.endswith(f"setup: meshwright 1.0 with torch {CUDA}\n")
    calls = checkout.calls()
    assert packages(calls) == ["torch", ".[dev]"] and not any("index" in call for call in calls)
    for constraint in constraints(calls):
        allowed = Requirement(constraint).specifier
        offered = ["2.12.0", "2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.14.0"]
        assert list(allowed.filter(offered)) == ["2.13.0", "2.13.0+cu130"]
    checkout.setup("--dev")
    assert checkout.calls() == []


def test_where_a_gpu_appears_the_cpu_build_is_replaced(checkout: Checkout) -> None:
    checkout.setup()
    assert checkout.torch() == CPU
    checkout.gpu_appears()
    checkout.calls()
    assert CUDA in checkout.setup().stdout and checkout.torch() == CUDA


def test_a_cpu_build_that_was_named_is_left_on_a_gpu(checkout: Checkout) -> None:
    checkout.gpu_appears()
    checkout.setup(TORCH="2.15.0+cpu")
    assert constraints(checkout.calls()) == ["torch==2.15.0+cpu"] * 2
    checkout.setup(TORCH="2.15.0+cpu")
    assert checkout.calls() == []


@pytest.mark.parametrize(
    ("torch", "gpu", "is_kept"),
    [
        ("2.12.1+cu130 for CUDA 13.0", True, True),
        ("2.12.1+cu130 for CUDA 13.0", False, True),
        ("2.12.1+cpu for CPUs", False, True),
        ("2.12.1+cpu for CPUs", True, False),
        ("2.12.1+rocm6.4 for ROCm 6.4", True, False),
    ],
)
def test_the_machines_torch_is_kept_if_it_can_use_the_machines_gpu(
    checkout: Checkout, torch: str, gpu: bool, is_kept: bool
) -> None:
    checkout.machine_has(torch)
    if gpu:
        checkout.gpu_appears()
    done = checkout.setup()
    calls = checkout.calls()
    assert calls[0] == ("-m venv --system-site-packages .venv" if is_kept else "-m venv .venv")
    assert (f"keeping the installed torch {torch}\n" in done.stdout) == is_kept
    assert (f"its torch {torch} is not used\n" in done.stdout) == (not is_kept)
    assert checkout.torch() == (torch if is_kept else CUDA)


def test_setup_says_that_the_torch_it_got_cannot_use_the_gpu(checkout: Checkout) -> None:
    checkout.gpu_appears()
    checkout.machine.fake("python3", PYTHON.replace(f'*!=*) echo "{CUDA}"', f'*!=*) echo "{CPU}"'))
    assert "this torch cannot use the NVIDIA GPU; choose a CUDA build" in checkout.setup().stderr


def test_setup_begins_again_where_an_environment_was_left_without_pip(checkout: Checkout) -> None:
    (checkout.folder / ".venv/bin").mkdir(parents=True)
    # What venv leaves where ensurepip is missing.
    shutil.copy(checkout.machine.folder / "python3", checkout.folder / ".venv/bin/python")
    checkout.setup()
    calls = checkout.calls()
    assert calls[0] == "-m venv .venv" and packages(calls) == ["torch", "."]


def test_setup_says_that_there_is_no_python(checkout: Checkout) -> None:
    (checkout.machine.folder / "python3").unlink()
    done = checkout.machine.run(checkout.script)
    assert done.returncode == 2 and "there is no python3 here" in done.stderr and "too old" not in done.stderr
