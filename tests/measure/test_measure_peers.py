"""Peers side by side: each system in a process of its own, ratios of medians, and the name of what is missing."""

import itertools
import json
import runpy
import subprocess
import sys
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.job import load_job

PEERS = Path(__file__).parents[2] / "benchmarks/peers"


def script(name: str) -> Any:
    """A script's functions, with its folder importable as it is when run."""
    sys.path.insert(0, str(PEERS))
    try:
        return Namespace(**runpy.run_path(str(PEERS / name)))
    finally:
        sys.path.remove(str(PEERS))


@pytest.fixture(scope="module")
def run() -> Any:
    """The command."""
    return script("run.py")


@pytest.mark.thorough
def test_a_tiny_shape_is_measured_and_a_missing_peer_is_named(tmp_path: Path, warm_python: Path) -> None:
    words = f"--setting tiny --repeats 1 --warmup 2 --steps 2 --out {tmp_path / 'out.json'}".split()
    done = subprocess.run([warm_python, str(PEERS / "run.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["settings"]["tiny"]
    assert found["systems"]["ours"]["tokens_per_s"] > 0
    missing = find_spec("torchtitan") is None
    why = "No module named 'torchtitan'" if missing else "torchtitan trains on GPUs only"
    assert found["systems"]["torchtitan"] == {"state": "skipped", "why": why}
    assert f"torchtitan: skipped ({why})" in done.stdout
    if find_spec("accelerate") is None:
        assert found["systems"]["transformers"] == {"state": "skipped", "why": "No module named 'accelerate'"}
    else:
        assert found["systems"]["transformers"]["parameters"] == found["systems"]["ours"]["parameters"]
        assert found["throughput_ratio"]["transformers"] > 0
        assert "× transformers" in done.stdout


@pytest.mark.thorough
def test_each_of_two_versions_of_a_peer_has_a_folder(tmp_path: Path, warm_python: Path) -> None:
    for name in ("torchtitan", "torchtitan-0.3"):
        package = tmp_path / name / "torchtitan"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise ImportError('this is {name}')")
    out, systems = tmp_path / "out.json", ["torchtitan", "torchtitan-0.3"]
    words = ["--setting", "tiny", "--repeats", "1", "--systems", ",".join(systems), "--out", str(out)]
    words += [word for name in systems for word in ("--packages", f"{name}={tmp_path / name}")]
    done = subprocess.run([warm_python, str(PEERS / "run.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["settings"]["tiny"]["systems"]
    assert {name: each["why"] for name, each in found.items()} == {name: f"this is {name}" for name in systems}


def test_ratios_are_of_medians_and_only_of_the_same_model(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def row(system: str, tokens_per_s: float, gib: int, parameters: int = 7) -> dict[str, Any]:
        measured = {"tokens_per_s": tokens_per_s, "peak_memory_bytes": gib * 2**30, "parameters": parameters}
        timing = {"timed_s": 1.0, "step_s": [0.1, 0.2, 0.3], "loss": 6.0, "versions": {"torch": "2"}}
        timing["gpu"] = {"clocks.sm": 1515.0, "power.draw": 698.0}
        return {"setting": "1b-32k", "system": system, "state": "measured", "device": "CPU", **measured, **timing}

    rows = [row("ours", each, 30) for each in (100.0, 120.0, 300.0)]
    rows += [row("transformers", each, 60) for each in (60.0, 50.0, 1000.0)]
    rows += [row("torchtitan", 10.0, 30, parameters=8)]
    found = run.report(rows, Namespace(steps=3, warmup=2, repeats=3, set=[]))
    assert found["settings"]["1b-32k"]["throughput_ratio"] == {"transformers": 2.0}
    assert found["settings"]["1b-32k"]["memory_ratio"] == {"transformers": 0.5}
    assert found["settings"]["1b-32k"]["another_model"] == ["torchtitan"]
    run.show(found)
    shown = capsys.readouterr().out
    assert "120 tokens/s (100 120 300)" in shown and "peak 30.0 GiB, 1,515 MHz at 698 W" in shown
    assert "ours is 2.000 × transformers, with 0.50 × its peak memory" in shown
    assert "no ratio to torchtitan" in shown


@pytest.mark.parametrize(
    ("errors", "state", "why"),
    [
        ("Traceback\nModuleNotFoundError: No module named 'tyro'\n", "skipped", "No module named 'tyro'"),
        ("noise\nskipped: torchtitan trains on GPUs only\n", "skipped", "torchtitan trains on GPUs only"),
        ("torch.OutOfMemoryError: CUDA out of memory.\n[W] late warning\n", "out of memory", "CUDA out of memory."),
        ("Traceback\nRuntimeError: no kernel\n[W] late warning\n", "failed", "RuntimeError: no kernel"),
        ("", "failed", "it printed nothing"),
    ],
)
def test_a_process_without_a_result_says_why(run: Any, errors: str, state: str, why: str) -> None:
    found = run.failure(errors)
    assert found["state"] == state and found["why"].endswith(why)


def test_our_job_is_the_setting_s(run: Any) -> None:
    for name, setting in run.SETTINGS.items():
        words = run.our_command(setting, 2, 3, ["optimizer.lr=0.5"])
        overrides = [value for word, value in itertools.pairwise(words) if word == "--set"]
        job = load_job("pretrain-1b", overrides).job
        for field in ("layers", "width", "heads", "kv_heads", "ffn_width", "vocab_size", "tied"):
            assert getattr(job.model, field) == getattr(setting, field), (name, field)
        assert job.tokens_per_step == setting.tokens_per_step and job.batch.micro_batch == setting.micro_batch
        recompute = "selective" if name == "8b-8k" else setting.recompute  # more than that fits in ours
        assert (job.memory.recompute, job.run.compiles) == (recompute, setting.compile)
        assert job.optimizer.clip == 1.0 and job.optimizer.lr == 0.5


def test_a_window_times_the_steps_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    window = script("window.py").Window(warmup=2, steps=3, device="cpu")
    for step_s in (50.0, 50.0, 1.0, 2.0):
        now_s += step_s
        window.step_ended()
    with pytest.raises(RuntimeError, match="4 steps ended"):
        window.result()
    for step_s in (4.0, 100.0):  # one more than asked for changes nothing
        now_s += step_s
        window.step_ended()
    result = window.result()
    assert result == {"device": "CPU", "timed_s": 7.0, "step_s": [1.0, 2.0, 4.0], "peak_memory_bytes": None}


def test_formats_are_counted_on_live_tensors() -> None:
    model = torch.nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    found = script("window.py").kept_formats(model, optimizer)
    assert found == {
        "parameters": {"float32": 32},
        "gradients": {"float32": 32},
        "optimizer_states": {"float32": 64},
    }
