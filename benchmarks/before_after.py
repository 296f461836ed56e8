"""Whether a change costs speed: the headline shape and the 8B model, with another checkout's code and with this one's.

    python benchmarks/before_after.py OTHER [--out FILE] [--seconds 540]

OTHER is a folder that has the other `meshwright` in it (`git archive COMMIT meshwright | tar x -C OTHER`). Processes of
the two alternate on one device (before, after, after, before, …), so that a drifting clock favours neither; each is one
`meshwright bench`, and the figure is the ratio of the mean of their median step times.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

from run import our_command  # noqa: E402
from shapes import SETTINGS  # noqa: E402

PAIRS = {"1b-tied-mb8": 3, "8b-8k": 2}
WARMUP, STEPS = 6, 20


def main() -> None:
    """Measure in turn, write after every process, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0, help="no process is started later than this")
    asked = parser.parse_args()
    code = {"before": asked.other.resolve(), "after": ROOT}
    began, rows = time.monotonic(), []
    for setting, pairs in PAIRS.items():
        order = [who for pair in range(pairs) for who in (("after", "before") if pair % 2 else ("before", "after"))]
        for who in order:
            if time.monotonic() - began > asked.seconds:
                print("no time left for", setting, who)
                continue
            rows.append({"setting": setting, "code": who, **measure(setting, code[who])})
            print(json.dumps(rows[-1]), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps({"rows": rows, "after_over_before": ratios(rows)}, indent=1) + "\n")
    for setting, ratio in ratios(rows).items():
        print(f"{setting}: a step takes {ratio:.4f} times as long as before")


def measure(setting: str, root: Path) -> dict[str, object]:
    """One process with the code under a folder."""
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    command = our_command(SETTINGS[setting], WARMUP, STEPS, ())
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, cwd="/", capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-800:]}
    bench = json.loads(done.stdout)
    return {
        "device": bench["device"],
        "torch": bench["torch"],
        "median_step_s": bench["step_s"]["median"],
        "peak_memory_bytes": bench["peak_memory_bytes"],
        "loss": statistics.mean(bench["losses"]),
    }


def ratios(rows: list[dict[str, object]]) -> dict[str, float]:
    """Step time after over before, for every setting that has both."""
    found = {}
    for setting in PAIRS:
        means = [
            [
                row["median_step_s"]
                for row in rows
                if (row["setting"], row["code"]) == (setting, who) and "failed" not in row
            ]
            for who in ("after", "before")
        ]
        if all(means):
            found[setting] = statistics.mean(means[0]) / statistics.mean(means[1])  # type: ignore[type-var]
    return found


if __name__ == "__main__":
    main()
