"""Peers side by side: each system in a process of its own, ratios of medians, and the name of what is missing."""

import json
import runpy
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks/peers"


@pytest.fixture(scope="module")
def run() -> Any:
    """The script's functions, with its folder importable as it is when run."""
    sys.path.insert(0, str(PEERS))
    try:
        return Namespace(**runpy.run_path(str(PEERS / "run.py")))
    finally:
        sys.path.remove(str(PEERS))


def test_a_tiny_shape_is_measured_and_a_missing_peer_is_named(tmp_path: Path) -> None:
    words = f"--setting tiny --repeats 1 --warmup 2 --steps 2 --out {tmp_path / 'out.json'}".split()
    done = subprocess.run([sys.executable, str(PEERS / "run.py"), *words], capture_output=True, text=True)
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


def test_ratios_are_of_medians_and_only_of_the_same_model(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def row(system: str, tokens_per_s: float, gib: int, parameters: int = 7) -> dict[str, Any]:
        measured = {"tokens_per_s": tokens_per_s, "peak_memory_bytes": gib * 2**30, "parameters": parameters}
        timing = {"timed_s": 1.0, "step_s": [0.1, 0.2, 0.3], "loss": 6.0, "versions": {"torch": "2"}}
        return {"setting": "1b-32k", "system": system, "state": "measured", **measured, **timing}

    rows = [row("ours", each, 30) for each in (100.0, 120.0, 300.0)]
    rows += [row("transformers", each, 60) for each in (60.0, 50.0, 1000.0)]
    rows += [row("torchtitan", 10.0, 30, parameters=8)]
    found = run.report(rows, Namespace(steps=3, warmup=2, repeats=3, set=[]))
    assert found["settings"]["1b-32k"]["throughput_ratio"] == {"transformers": 2.0}
    assert found["settings"]["1b-32k"]["memory_ratio"] == {"transformers": 0.5}
    assert found["settings"]["1b-32k"]["another_model"] == ["torchtitan"]
    run.show(found)
    shown = capsys.readouterr().out
    assert "120 tokens/s (100 120 300)" in shown
    assert "ours is 2.000 × transformers, with 0.50 × its peak memory" in shown
    assert "no ratio to torchtitan" in shown


@pytest.mark.parametrize(
    ("errors", "state", "why"),
    [
        ("Traceback\nModuleNotFoundError: No module named 'tyro'\n", "skipped", "No module named 'tyro'"),
        ("noise\nskipped: torchtitan trains on GPUs only\n", "skipped", "torchtitan trains on GPUs only"),
        ("torch.OutOfMemoryError: CUDA out of memory.\n[W] late warning\n", "out of memory", "CUDA out of memory."),
        ("Traceback\nRuntimeError: no kernel\n[W] late warning\n", "failed", "RuntimeError: no kernel"),
        ("", "failed", "it said nothing"),
    ],
)
def test_a_process_without_a_result_says_why(run: Any, errors: str, state: str, why: str) -> None:
    found = run.failure(errors)
    assert found["state"] == state and found["why"].endswith(why)
