"""A run of very many steps, and very many runs: how long the report, `status` and the studio take.

    python benchmarks/long_runs.py [--megabytes 1000] [--runs 200] [--out FILE]

Each is measured in its own process: wall time, CPU time and peak memory. The files are in a temporary folder and are
removed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LINE = (
    '{{"step": {step}, "loss": {loss:.8f}, "grad_norm": 0.51234567, "lr": 0.0003, "tokens": {tokens}, '
    '"tokens_per_s": 51234.567, "mfu": 0.41, "data_wait_s": 0.00012, "step_s": 0.51, "memory_bytes": 41234567168, '
    '"attempt": 0}}\n'
)


def make_run(path: Path, megabytes: float) -> int:
    """A run whose metrics.jsonl has this many megabytes; its number of steps."""
    from meshwright.runs import RunFolder

    run = RunFolder.create(path, "[run]\n", {"run": {"steps": 10**9}}, ["meshwright"])
    run.event("start", device="CPU", parameters=1_000_000, gpu=None, ranks=1, attempt=0, step=0)
    step, written = 0, 0
    with (path / "metrics.jsonl").open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            lines = [
                LINE.format(step=step + n, loss=2 + 8 / (step + n), tokens=65536 * (step + n)) for n in range(1, 1001)
            ]
            text = "".join(lines)
            file.write(text)
            step, written = step + 1000, written + len(text)
    run.event("stop", reason="finished", step=step)
    return step


def look(what: str, folder: Path) -> dict[str, Any]:
    """One look at the runs of a folder, in this process."""
    from meshwright.launch.slurm import status_of, statuses
    from meshwright.studio import write_report
    from meshwright.studio.runs import Runs

    runs = Runs(folder)
    before, began, used = _peak_mib(), time.perf_counter(), time.process_time()
    answers, longest = 1, 0.0
    if what == "report":
        write_report(folder / "run", folder.parent / "report.html")
    elif what == "status":
        status_of(folder / "run")
    elif what == "status of all":
        statuses(folder)
    elif what == "list of runs":
        runs.listed()
    elif what == "list of runs again":
        runs.listed()
        began, used = time.perf_counter(), time.process_time()
        runs.listed()
    else:
        names, read = runs.names()[:50], 0.0
        while read < 1:
            asked = time.perf_counter()
            curves = runs.curves(names, "step")
            longest = max(longest, time.perf_counter() - asked)
            read, answers = min((curves.get(name, {"read": 0.0})["read"] for name in names), default=1.0), answers + 1
    seconds = {"seconds": round(time.perf_counter() - began, 3), "processor_s": round(time.process_time() - used, 3)}
    slowest = {"answers": answers, "longest_answer_s": round(longest, 3)} if longest else {}
    return {**seconds, **slowest, "grew_mib": round(_peak_mib() - before)}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--look", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.look:
        print(json.dumps(look(given.look, given.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        long, many = Path(name, "long"), Path(name, "many")
        steps = make_run(long / "run", given.megabytes)
        for number in range(given.runs):
            make_run(many / f"run-{number:03}", 0.2)
        found = {
            f"one run of {steps:,} steps, {given.megabytes:,.0f} MB": {
                what: _apart(what, long) for what in ("report", "status", "list of runs", "curves")
            },
            f"{given.runs} runs": {
                what: _apart(what, many) for what in ("status of all", "list of runs", "list of runs again", "curves")
            },
        }
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0], **found}, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


def _apart(what: str, folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, __file__, "--look", what, "--folder", str(folder)], stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
