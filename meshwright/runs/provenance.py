"""Where a run came from: the code it ran and the machine it ran on."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import meshwright
from meshwright.reading import Unfit, read_text
from meshwright.runs.redact import recorded_command, recorded_variables
from meshwright.version import VERSION

_GIT_TIMEOUT_S = 30
_AS_TEXT = ("--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short")


def describe_environment(argv: list[str]) -> dict[str, Any]:
    """Versions, machine, devices, the variables that affect a run, and the command."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "argv": recorded_command(argv),
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "torch": _package_version("torch"),
        "numpy": _package_version("numpy"),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "cpu": cpu_name(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": _device_names(),
        "driver": _driver_version(),
        "variables": recorded_variables(os.environ),
    }


def describe_packages() -> dict[str, str]:
    """Every installed package with its version."""
    found = dict(_named(package) for package in distributions())
    return dict(sorted((name, number) for name, number in found.items() if name and number))


def _named(package: Distribution) -> tuple[str | None, str | None]:
    """Name and version from the first lines of its description; to parse all of it takes 20 times as long."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    lines = [line.partition(": ") for line in text.partition("\n\n")[0].splitlines()]
    fields = {name: value for name, _, value in lines}
    return fields.get("Name"), fields.get("Version")


def describe_code() -> tuple[dict[str, Any], str]:
    """Versions of the package and of the repositories that contain it and the working directory, with their diffs."""
    package = Path(meshwright.__file__).parent
    checkout = _repository(package / "__init__.py")
    here = _repository(Path.cwd())
    if here and checkout and here["root"] == checkout["root"]:
        here = None
    diffs = [(repository["root"], repository.pop("diff")) for repository in (checkout, here) if repository]
    text = "".join(f"# uncommitted changes in {root}\n{diff}" for root, diff in diffs if diff)
    return {"meshwright": VERSION, "package": checkout, "working_directory": here}, text


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device_names() -> list[str]:
    """GPU names from the driver: asking torch would initialize CUDA in a process that may still fork its ranks."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not shutil.which("nvidia-smi"):
        return []
    listed = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], Path.cwd())
    return listed.splitlines() if listed else []


def _driver_version() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    report = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], Path.cwd())
    return report.splitlines()[0] if report else None


def cpu_name() -> str | None:
    """The CPU's name according to Linux; None if unknown, as on most ARM machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _repository(path: Path) -> dict[str, Any] | None:
    """Root, commit and uncommitted changes of the git checkout containing a path; None outside one or without git."""
    folder = path if path.is_dir() else path.parent
    root = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    if root is None:
        return None
    # Git only finds the checkout here, which runs nothing; it refuses that of another user.
    find = ["git", "-c", "safe.bareRepository=explicit", "rev-parse", "--path-format=absolute"]
    located = (_output([*find, "--show-toplevel", "--git-dir", "--git-common-dir"], folder) or "").splitlines()
    if len(located) != 3 or Path(located[0]) != root.resolve():  # core.worktree may name any other folder
        return None
    commit = (_output([*find, "--verify", "-q", "HEAD"], folder) or "").strip() or None
    with tempfile.TemporaryDirectory() as private_folder:
        git = _git_without_settings_of(Path(located[1]), Path(located[2]), root, commit, Path(private_folder))
        named = ["--", str(path.resolve())]
        # An installed package may be inside an unrelated checkout, in an ignored environment: not its code.
        if path.is_file() and not git("ls-files", "--cached", "--others", "--exclude-standard", *named):
            return None
        status = git("status", "--porcelain", "--ignore-submodules=dirty")
        diff = git("diff", *_AS_TEXT, "--ignore-submodules=dirty", "HEAD") if commit else ""
    return {
        "root": located[0],
        "commit": commit,
        "dirty": None if status is None else bool(status.strip()),
        "untracked": [line[3:] for line in (status or "").splitlines() if line.startswith("??")],
        "diff": diff or "",
    }


def _git_without_settings_of(
    git_folder: Path, shared: Path, root: Path, commit: str | None, private: Path
) -> Callable[..., str | None]:
    """Git for a checkout whose .git may be a stranger's: its settings, attributes and hooks name commands to run.

    So git gets a folder of ours in place of .git, with the objects, the index and the excluded names of theirs alone.
    """
    (private / "refs").mkdir()
    (private / "info").mkdir()
    (private / "HEAD").write_text(f"{commit or 'ref: refs/heads/main'}\n")
    with suppress(OSError, Unfit):
        (private / "info" / "exclude").write_text(read_text(shared / "info" / "exclude"), encoding="utf-8")
    variables = os.environ | {
        "GIT_DIR": str(private),
        "GIT_WORK_TREE": str(root),
        "GIT_OBJECT_DIRECTORY": str(shared / "objects"),
        "GIT_INDEX_FILE": str(git_folder / "index"),
        "GIT_OPTIONAL_LOCKS": "0",
    }
    # A monitor in the user's settings would stay behind, watching a folder that is gone.
    return lambda *words: _output(["git", "-c", "core.fsmonitor=false", *words], root, variables)


def _output(command: list[str], folder: Path, variables: dict[str, str] | None = None) -> str | None:
    """What a command prints; None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
