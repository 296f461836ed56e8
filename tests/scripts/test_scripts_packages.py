"""What the scripts ask the system for where something is missing: a PATH of fake commands, nothing installed."""

import runpy
from pathlib import Path

import pytest
from fake_machine import Machine

ROOT = Path(__file__).parents[2]
SLURM_NEEDS = runpy.run_path(str(ROOT / "tests/launch/slurm_cluster.py"))["COMMANDS"]
SLURM_PACKAGES = "slurm-wlm munge iproute2 util-linux procps"
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
