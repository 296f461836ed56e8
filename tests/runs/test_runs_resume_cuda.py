"""On one GPU in deterministic mode a resumed run writes the bits of one left alone."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.runs.folder import RunFolder


def rows(folder: str) -> list[tuple[str, ...]]:
    metrics = [row for row in RunFolder.open(Path(folder)).metrics() if "loss" in row]
    return [tuple(repr(row[name]) for name in ("step", "loss", "grad_norm", "lr")) for row in metrics]


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_a_resumed_gpu_run_is_exact(tiny_job: Path, monkeypatch: pytest.MonkeyPatch, compute: str) -> None:
    monkeypatch.chdir(tiny_job.parent)
    settings = ["data.cache=cache", "run.device=cuda", "run.deterministic=true", f"precision.compute={compute}"]
    settings += ["checkpoint.every_steps=4", "checkpoint.keep_last=9", "evaluation.sample_tokens=0"]
    run_job(load_job("job.toml", [*settings, "run.folder=whole"]), Console(quiet=True))
    shutil.copytree("whole", "run")
    for step in (8, 10):
        shutil.rmtree(f"run/checkpoints/step-{step:08d}")
    run_job(load_job("job.toml", [*settings, "run.folder=run"]), Console(quiet=True), resume=True)
    assert rows("run") == rows("whole") and len(rows("run")) == 10
