"""A run chooses what `auto` stands for once: its folder has the values, and every resume repeats them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from meshwright.checkpoint import newest
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.layout import Device
from meshwright.runs import RunFolder, auto

SETTINGS = [
    "data.cache=cache", "checkpoint.every_steps=2", "evaluation.every_steps=0", "batch.sequence_length=16",
    "model.layers=1", "model.width=32", "model.heads=2", "model.kv_heads=1", "model.ffn_width=32", "run.steps=2",
]  # fmt: skip


def chosen(job: dict[str, Any]) -> tuple[Any, Any]:
    return job["precision"]["compute"], job["run"]["compile"]


def train(source: str, *overrides: str, resume: bool = False) -> None:
    run_job(load_job(source, [*SETTINGS, "run.folder=run", *overrides]), Console(quiet=True), resume=resume)


def test_what_a_device_is_given_stays_with_the_run(tiny_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_job.parent)
    with monkeypatch.context() as elsewhere:  # a device with bf16 but without a compiler
        elsewhere.setattr(auto, "capabilities", lambda device: Device("a GPU", True, "triton is not installed"))
        train("job.toml")
    run = RunFolder.open(Path("run"))
    assert chosen(run.job()) == chosen(newest(Path("run")).job()) == ("bf16", False)
    assert load_job("run").job.precision.compute == "bf16"
    assert load_job("run/job.toml", trust=True).job.precision.compute == "auto", "the file is as the user wrote it"

    train("job.toml", "run.steps=4", resume=True)  # a job file that leaves both to a machine that would take fp32
    assert chosen(run.job()) == chosen(newest(Path("run")).job()) == ("bf16", False)
    [resumed] = run.events("resume")
    assert set(resumed["changed"]) == {"run.steps"}
    text = run.job_file()
    assert "steps = 4" in text and "compute" not in text and "width" in text and "betas" not in text

    shutil.rmtree("run")
    train("job.toml")
    assert chosen(RunFolder.open(Path("run")).job()) == ("fp32", False)


def test_a_capable_gpu_computes_in_bf16_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.train import device

    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    for capability, expected in (((8, 0), ("bf16", True)), ((7, 5), ("fp32", True)), ((6, 1), ("fp32", False))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, has=capability: has)
        values = auto.values_of_auto(load_job("demo").job, gpu)
        assert (values["precision.compute"], values["run.compile"]) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert auto.values_of_auto(load_job("demo").job, gpu)["run.compile"] is False
    assert auto.values_of_auto(load_job("demo", ["precision.compute=fp32", "run.compile=true"]).job, gpu) == {}
