"""The examination: complete, honest about what is not there, and unable to raise."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import sys
import tomllib
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.hardware import Finding, examine
from meshwright.hardware.doctor import OPTIONAL, REQUIRED
from meshwright.hardware.torch_versions import OLDEST

ROOT = Path(__file__).parents[2]


def by_name() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine()}


def test_every_subject_has_a_line() -> None:
    found = by_name()
    subjects = {"python", "torch", "requirements", "backends", "cpu", "memory", "disk here", "disk cache", "compiler"}
    subjects |= {
        "triton",
        "git",
        "sbatch",
        "kubectl",
        "wandb",
        "tensorboard",
        "mlflow",
        "pyarrow",
        "s3fs",
        "aiohttp",
        "ray",
    }
    assert subjects <= set(found)
    assert found["torch"].status == "ok" and torch.__version__ in found["torch"].value
    assert "gloo" in found["backends"].value


def test_a_torch_too_old_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    finding = by_name()["torch"]
    assert finding.status == "missing" and "pip install 'torch>=2.11'" in finding.note


def test_a_torch_newer_than_tested_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.115.0a1+cu140")
    finding = by_name()["torch"]
    assert finding.status == "warning" and "newer than 2.15, the newest release tested" in finding.note


def test_the_oldest_torch_is_the_package_s() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"torch>={'.'.join(map(str, OLDEST))}" in pyproject["project"]["dependencies"]


@cache
def imported() -> set[str]:
    """The packages that our code imports: by statement, by name, and as readers that `need` may be asked for."""
    found: set[str] = set()
    for file in (ROOT / "meshwright").rglob("*.py"):
        tree = ast.parse(file.read_text())
        for_types = {id(below) for node in ast.walk(tree) if _checks_types(node) for below in ast.walk(node)}
        for node in ast.walk(tree):
            if id(node) in for_types:
                continue
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "need"):
                found |= {str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant)}
            elif file.name == "extras.py" and isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                found |= set(ast.literal_eval(node.value))
    # Torch's writer for TensorBoard is that package's, and many packages share the name nvidia.
    whole = {"torch.utils.tensorboard": "tensorboard", "nvidia.dali": "nvidia.dali"}
    return {whole.get(name, name.split(".")[0]) for name in found}


def _checks_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.thorough
def test_only_packages_that_are_imported_are_named() -> None:
    found = imported()
    assert {"wandb", "s3fs", "triton", "numpy"} <= found, "what finds them works"
    assert set(OPTIONAL) <= found and set(REQUIRED.values()) <= found
    assert not found & {"datasets", "torchao", "webdataset", "transformers"}, "name them once they are used"


def test_every_package_that_is_imported_is_named_or_required() -> None:
    lines = [line for package in REQUIRED for line in requires(package) or () if "extra ==" not in line]
    beneath = {name for line in lines for name in re.findall(r"^[\w-]+", line)}
    known = {*sys.stdlib_module_names, "meshwright", "torch", "triton", *REQUIRED.values(), *OPTIONAL}
    assert imported() - known <= {name.replace("-", "_") for name in beneath}


def test_required_packages_are_those_of_the_project() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {"torch", *REQUIRED} == {re.split("[<>=]", line)[0] for line in wanted}


def test_a_package_of_several_names_is_found_by_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI has one for each CUDA, and what is imported lies inside a package that may be missing as a whole."""
    monkeypatch.setattr("meshwright.hardware.doctor.find_spec", lambda name: object())
    versions = {"nvidia-dali-cuda130": "2.4.0", "mlflow-skinny": "3.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("meshwright.hardware.doctor.version", version)
    found = by_name()
    assert found["nvidia-dali-cuda120"] == Finding("nvidia-dali-cuda120", "ok", "2.4.0", "optional")
    assert found["mlflow"].value == "3.1" and found["wandb"].value == "of an unknown version"

    def no_parent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("meshwright.hardware.doctor.find_spec", no_parent)
    line = by_name()["nvidia-dali-cuda120"]
    assert line.status == "warning" and line.note.endswith("pip install nvidia-dali-cuda120")


def test_absent_packages_and_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    gone = ("wandb", "tokenizers")
    monkeypatch.setattr("meshwright.hardware.doctor.find_spec", lambda name: None if name in gone else real(name))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = by_name()
    assert found["wandb"].status == "warning" and "pip install wandb" in found["wandb"].note
    assert found["requirements"] == Finding("requirements", "missing", "tokenizers", "pip install tokenizers")
    assert found["compiler"].status == found["git"].status == "warning"


@pytest.mark.parametrize(
    ("name", "memory_gib", "status"), [("NVIDIA H200", 139.8, "ok"), ("NVIDIA T9000", 31.0, "warning")]
)
def test_gpus_are_looked_up(monkeypatch: pytest.MonkeyPatch, name: str, memory_gib: float, status: str) -> None:
    properties = SimpleNamespace(name=name, total_memory=int(memory_gib * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    finding = by_name()["gpu 0"]
    assert finding.status == status and name in finding.value


def test_a_probe_that_fails_becomes_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("driver and library\nversions differ")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(shutil, "disk_usage", broken)
    found = by_name()
    assert found["devices"].status == "warning" and found["devices"].note == "RuntimeError: driver and library"
    assert found["disk"].status == "warning"
    assert found["python"].status == "ok"
