"""What a benchmark says of a GPU's clock and power, read from nvidia-smi beside it."""

import os
import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for_file

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu_readings.py"


@pytest.fixture(scope="module")
def readings() -> Any:
    """The benchmarks' module."""
    return Namespace(**runpy.run_path(str(SCRIPT)))


def test_medians_are_of_the_time_in_which_the_gpu_is_busy(readings: Any) -> None:
    idle, busy = ["345", "3201", "80", "30", "0"], [[str(1500 + n), "3201", "690.5", "60", "100"] for n in range(20)]
    found = readings.settled([idle, ["[N/A]", "1", "2", "3", "4"], *busy, ["15"]])
    assert found["readings"] == 20 and found["clocks.sm"] == 1509.5 and found["power.draw"] == 690.5
    assert (found["first_clock"], found["last_clock"]) == (1500.5, 1518.5)
    assert readings.said(found) == ", 1,510 MHz at 690 W"
    assert readings.settled([idle]) == {} and readings.said({}) == ""


def test_it_is_asked_while_something_runs(readings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    printed = tmp_path / "printed"
    program.write_text(f"#!/bin/sh\necho '1515, 3201, 698.1, 55, 100'\n: > {printed}\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with readings.gpu_readings() as found:
        assert found == {}
        wait_for_file(printed)
    assert found["clocks.sm"] == 1515.0 and found["readings"] == 1
    monkeypatch.setenv("PATH", "")
    with readings.gpu_readings() as found:
        pass
    assert found == {}
