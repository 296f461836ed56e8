"""What the scripts ask the system for where something is missing: a PATH of fake commands, nothing installed."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLURM_NEEDS = runpy.run_path(str(ROOT / "tests/launch/slurm_cluster.py"))["COMMANDS"]
SLURM_PACKAGES = "slurm-wlm munge iproute2 util-linux procps"


class Machine:
    """A PATH of fake commands; its apt-get writes down what it was asked and brings what it was told to bring."""

    def __init__(self, folder: Path, commands: tuple[str, ...], user: int = 0) -> None:
        self.folder, self.asked = folder / "bin", folder / "asked"
        self.folder.mkdir()
        self.fake("id", f"echo {user}")
        self.apt_get()
        for name in commands:
            self.fake(name)

    def fake(self, name: str, does: str = "exit 0") -> None:
        path = self.folder / name
        path.write_text(f"#!{shutil.which('bash')}\n{does}\n")
        path.chmod(0o755)

    def real(self, *names: str) -> None:
        for name in names:
            (self.folder / name).symlink_to(str(shutil.which(name)))

    def apt_get(self, brings: str | None = None, fails_at: str | None = None) -> None:
        """The package manager: an install makes the command `brings`, and the action `fails_at` fails."""
        made = (
            f"[ $1 != install ] || {{ : > {self.folder}/{brings}; {shutil.which('chmod')} +x {self.folder}/{brings}; }}"
        )
        fails = f"[ $1 != {fails_at} ] || exit 100"
        self.fake("apt-get", f'echo "$@" >> {self.asked}\n{fails}\n{made if brings else ""}\nexit 0')

    def installed(self) -> list[str]:
        """The packages that were asked for, an entry for each call that installs."""
        calls = self.asked.read_text().splitlines() if self.asked.exists() else []
        words = [[word for word in call.split()[1:] if not word.startswith("-")] for call in calls if "install" in call]
        return [" ".join(names) for names in words]

    def run(self, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(shutil.which("bash")), str(script), *arguments]
        return subprocess.run(command, env={"PATH": str(self.folder)}, capture_output=True, text=True)


SLURM = ROOT / "scripts/slurm-packages"


def test_a_machine_with_everything_is_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, SLURM_NEEDS)
    done = machine.run(SLURM, "--required")
    assert (done.returncode, done.stderr, machine.installed()) == (0, "", [])


@pytest.mark.parametrize("lacking", SLURM_NEEDS)
def test_any_one_missing_command_of_slurm_is_installed(tmp_path: Path, lacking: str) -> None:
    machine = Machine(tmp_path, tuple(name for name in SLURM_NEEDS if name != lacking))
    machine.apt_get(brings=lacking)
    done = machine.run(SLURM, "--required")
    assert (done.returncode, done.stderr, machine.installed()) == (0, "", [SLURM_PACKAGES])


def test_a_bare_machine_is_given_slurm_and_says_what_is_still_missing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ("ip", "nsenter", "unshare"))
    machine.apt_get(brings="slurmctld")
    done = machine.run(SLURM, "--required")
    assert (done.returncode, machine.installed()) == (1, [SLURM_PACKAGES])
    assert "still missing: slurmd munged sbatch srun scancel scontrol sinfo pkill;" in done.stderr


@pytest.mark.parametrize("action", ["update", "install"])
def test_a_package_manager_that_fails_is_an_error_only_where_slurm_is_required(tmp_path: Path, action: str) -> None:
    machine = Machine(tmp_path, ("ip",))
    machine.apt_get(brings="slurmctld", fails_at=action)
    needed, optional = machine.run(SLURM, "--required"), machine.run(SLURM)
    assert (needed.returncode, optional.returncode) == (1, 0)
    for done in (needed, optional):
        assert "apt-get could not install slurm-wlm munge" in done.stderr and "will not run" in done.stderr


def test_without_root_or_apt_nothing_is_tried(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ("ip",), user=1000)
    done = machine.run(SLURM, "--required")
    assert (done.returncode, machine.installed()) == (1, []) and "not root" in done.stderr
    machine.fake("id", "echo 0")
    (machine.folder / "apt-get").unlink()
    done = machine.run(SLURM)
    assert done.returncode == 0 and "no apt-get here" in done.stderr


def test_chromium_is_installed_where_it_is_missing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ())
    assert machine.run(ROOT / "scripts/chromium-packages").returncode == 0
    assert machine.installed() == ["chromium fonts-dejavu-core"]
    machine.apt_get(fails_at="install")
    assert machine.run(ROOT / "scripts/chromium-packages").returncode != 0
    machine.fake("id", "echo 1000")
    assert machine.run(ROOT / "scripts/chromium-packages").returncode == 2
    machine.fake("chromium")
    assert machine.run(ROOT / "scripts/chromium-packages").returncode == 0
    assert len(machine.installed()) == 2


# A Python that knows just what setup asks of it; `venv` makes one more like it, with pip.
PYTHON = """
case "$*" in
  *sys.version_info*|*importlib*) exit 0 ;;
  "-m venv .venv") echo venv >> made; mkdir -p .venv/bin; cp "$0" .venv/bin/python; : > .venv/pip
    echo '#!/bin/sh' > .venv/bin/meshwright; chmod +x .venv/bin/meshwright ;;
  "-m pip --version") test -f .venv/pip ;;
  "-m pip install"*) test -f .venv/pip && echo pip >> made ;;
  *) exit 9 ;;
esac"""


def checkout(folder: Path) -> Path:
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup", folder / "scripts/setup")
    (folder / "pyproject.toml").touch()
    (folder / "constraints.txt").touch()
    return folder / "scripts/setup"


def test_setup_begins_again_where_an_environment_was_left_without_pip(tmp_path: Path) -> None:
    setup, machine = checkout(tmp_path), Machine(tmp_path, ())
    machine.real("dirname", "grep", "touch", "cp", "mkdir", "chmod")
    machine.fake("python3", PYTHON)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(
        machine.folder / "python3", tmp_path / ".venv/bin/python"
    )  # what venv leaves where ensurepip is missing
    done = machine.run(setup)
    assert (done.returncode, (tmp_path / "made").read_text().split()) == (0, ["venv", "pip"]), done.stderr
    os.utime(tmp_path / "pyproject.toml", (0, 0))
    os.utime(tmp_path / "constraints.txt", (0, 0))
    assert machine.run(setup).returncode == 0 and (tmp_path / "made").read_text().split() == ["venv", "pip"]


def test_setup_says_that_there_is_no_python(tmp_path: Path) -> None:
    setup, machine = checkout(tmp_path), Machine(tmp_path, ())
    machine.real("dirname")
    done = machine.run(setup)
    assert done.returncode == 2 and "there is no python3 here" in done.stderr and "too old" not in done.stderr
