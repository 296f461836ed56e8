"""The examination: complete, honest about what is not there, and unable to raise."""

import importlib.util
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.hardware import Finding, examine
from meshwright.hardware.torch_versions import OLDEST


def by_name() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine()}


def test_every_subject_has_a_line() -> None:
    found = by_name()
    subjects = {"python", "torch", "requirements", "backends", "cpu", "memory", "disk here", "disk cache", "compiler"}
    subjects |= {"triton", "git", "sbatch", "transformers", "torchao", "wandb", "tensorboard", "mlflow", "pyarrow"}
    subjects |= {"datasets", "ray", "webdataset"}
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
