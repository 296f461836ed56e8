"""A check of this machine: what Meshwright finds here, one line each, and what is missing."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from meshwright.hardware.gpus import find_gpu
from meshwright.hardware.torch_versions import too_old, untested

Status = Literal["ok", "missing", "warning"]

_OLDEST_PYTHON = (3, 11)
_TORCH_INSTALL = "pip install 'torch>=2.11'"
_LOW_DISK_GIB = 10
REQUIRED = {
    **{name: name for name in ("numpy", "pydantic", "typer", "rich", "safetensors", "tokenizers", "fsspec", "jinja2")},
    "huggingface_hub": "huggingface_hub",
    "markdown-it-py": "markdown_it",
    "pyyaml": "yaml",
}
"""Packages that are installed with this one, and what they are imported as; torch has a line of its own."""
OPTIONAL = {
    "wandb": "no Weights & Biases sink",
    "tensorboard": "no TensorBoard sink",
    "mlflow": "no MLflow sink",
    "pyarrow": "no Parquet, Arrow or .zst data",
    "s3fs": "no data or backups in s3://",
    "aiohttp": "no data from http:// and https://",
    "ray": "no runs on Ray clusters",
    "PIL": "no pictures",
    "av": "no film or sound",
    "torchvision": "no pictures decoded on the GPU",
    "PyNvVideoCodec": "no film decoded on the GPU",
    "nvidia.dali": "no pictures decoded by DALI",
}
"""Packages some features import, and what is missing without them; triton is reported with the compilers."""
_INSTALLED_AS = {
    "mlflow": ("mlflow", "mlflow-skinny"),
    "PIL": ("pillow",),
    "nvidia.dali": ("nvidia-dali-cuda120", "nvidia-dali-cuda130"),
}
"""Packages of another name than what is imported, any of which may be there; the first is what to install."""
_PROGRAMS = {
    "git": "run folders will not record the code version",
    "sbatch": "no Slurm here: jobs run on this machine only",
    "kubectl": "manifests for Kubernetes can be written, but not applied from here",
}


@dataclass(frozen=True)
class Finding:
    """One line of the check: "missing" is a hard requirement, "warning" is good to know."""

    name: str
    status: Status
    value: str
    note: str = ""


def examine() -> list[Finding]:
    """Every finding on this machine; a probe that fails is itself a finding, so this never raises."""
    probes: dict[str, Callable[[], Iterator[Finding]]] = {
        "python": _python,
        "torch": _torch,
        "requirements": _requirements,
        "devices": _devices,
        "backends": _backends,
        "cpu": _cpu,
        "memory": _host_memory,
        "disk": _disk,
        "compiler": _compiler,
        "programs": _programs,
        "extras": _extras,
    }
    return [finding for name, probe in probes.items() for finding in _guarded(name, probe)]


def _guarded(name: str, probe: Callable[[], Iterator[Finding]]) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(probe())
    except Exception as error:  # the check must finish on machines where things are broken
        first_line = next(iter(str(error).splitlines()), "")
        found.append(Finding(name, "warning", "could not be checked", f"{type(error).__name__}: {first_line}"))
    return found


def _python() -> Iterator[Finding]:
    if sys.version_info >= _OLDEST_PYTHON:
        yield Finding("python", "ok", platform.python_version(), sys.executable)
    else:
        yield Finding("python", "missing", platform.python_version(), "install Python 3.11 or newer")


def _torch() -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("torch", "missing", "not installed", _TORCH_INSTALL)
        return
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    value = f"{torch.__version__} ({build if torch.version.cuda or torch.version.hip else 'CPU build'})"
    if too_old(torch.__version__):
        yield Finding("torch", "missing", value, f"too old: {_TORCH_INSTALL}")
    elif note := untested(torch.__version__):
        yield Finding("torch", "warning", value, note)
    else:
        yield Finding("torch", "ok", value)


def _requirements() -> Iterator[Finding]:
    absent = [package for package, module in REQUIRED.items() if find_spec(module) is None]
    if absent:
        yield Finding("requirements", "missing", ", ".join(absent), f"pip install {' '.join(absent)}")
    else:
        yield Finding("requirements", "ok", ", ".join(f"{name} {version(name)}" for name in REQUIRED))


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("gpu", "warning", "none visible", "training runs on the CPU, MFU is not reported")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        value = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        gpu = find_gpu(properties.name, properties.total_memory)
        if gpu is None:
            yield Finding(f"gpu {index}", "warning", value, "not in the hardware table: no MFU")
        else:
            yield Finding(f"gpu {index}", "ok", value, f"known as {gpu.key}")


def _backends() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("backends", "warning", "torch.distributed is not built in", "one process only")
        return
    present = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    names = ", ".join(name for name, there in present.items() if there) or "none"
    absent = ", ".join(name for name, there in present.items() if not there)
    yield Finding("backends", "ok" if present["gloo"] else "warning", names, f"absent: {absent}" if absent else "")


def _cpu() -> Iterator[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    value = f"{usable} of {os.cpu_count()} cores usable, {torch.get_num_threads()} torch threads"
    yield Finding("cpu", "ok", value, platform.machine())


def _host_memory() -> Iterator[Finding]:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page_bytes / 2**30 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    yield Finding("memory", "ok", f"{total:.1f} GiB, {free:.1f} GiB unused")


def _disk() -> Iterator[Finding]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for name, folder in (("disk here", Path.cwd()), ("disk cache", cache)):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free_gib = shutil.disk_usage(existing).free / 2**30
        enough = free_gib >= _LOW_DISK_GIB
        note = (
            str(folder) if enough else f"{folder}: little space for checkpoints; free some or set run.folder elsewhere"
        )
        yield Finding(name, "ok" if enough else "warning", f"{free_gib:.1f} GiB free", note)


def _compiler() -> Iterator[Finding]:
    compilers = [name for name in ("gcc", "g++", "clang++") if shutil.which(name)]
    if {"g++", "clang++"} & set(compilers):
        yield Finding("compiler", "ok", ", ".join(compilers))
    else:
        yield Finding("compiler", "warning", "no g++ or clang++", "run.compile needs one on the CPU: apt install g++")
    if find_spec("triton") is not None:
        yield Finding("triton", "ok", version("triton"))
    else:
        yield Finding("triton", "warning", "not installed", "run.compile has no GPU kernels without it")


def _programs() -> Iterator[Finding]:
    for program, without in _PROGRAMS.items():
        where = shutil.which(program)
        yield Finding(program, "ok", where) if where else Finding(program, "warning", "not found", without)


def _extras() -> Iterator[Finding]:
    for package, without in OPTIONAL.items():
        names = _INSTALLED_AS.get(package, (package,))
        if _is_there(package):
            installed = next(
                (found for name in names if (found := _version(name)) is not None), "of an unknown version"
            )
            yield Finding(names[0], "ok", installed, "optional")
        else:
            yield Finding(names[0], "warning", "not installed", f"optional: {without}; pip install {names[0]}")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
