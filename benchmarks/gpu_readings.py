"""A GPU's clock, power and temperature while something runs, by nvidia-smi every half second."""

import csv
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READINGS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")


@contextmanager
def gpu_readings() -> Iterator[dict[str, Any]]:
    """Medians while the GPU was at least 90% busy, and how the clock began and ended, there when the block ends; empty
    without nvidia-smi."""
    found: dict[str, Any] = {}
    if not shutil.which("nvidia-smi"):
        yield found
        return
    query = [f"--query-gpu={','.join(READINGS)}", "--format=csv,noheader,nounits", "-lms", "500"]
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(["nvidia-smi", *query], stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.kill()
            process.wait()
            file.seek(0)
            found |= settled(list(csv.reader(file)))


def settled(lines: list[list[str]]) -> dict[str, Any]:
    """Of nvidia-smi's lines."""
    busy = []
    for line in lines:
        try:
            row = dict(zip(READINGS, map(float, line), strict=True))
        except ValueError:  # "[N/A]", or a line that was cut off
            continue
        busy += [row] if row["utilization.gpu"] >= 90.0 else []
    if not busy:
        return {}
    tenth = max(1, len(busy) // 10)
    clocks = [row["clocks.sm"] for row in busy]
    medians = {name: statistics.median(row[name] for row in busy) for name in READINGS}
    ends = {"first_clock": statistics.mean(clocks[:tenth]), "last_clock": statistics.mean(clocks[-tenth:])}
    return {"readings": len(busy), **medians, **ends}


def said(found: dict[str, Any]) -> str:
    """A clause for a line of results; empty without readings."""
    return f", {found['clocks.sm']:,.0f} MHz at {found['power.draw']:.0f} W" if found else ""
