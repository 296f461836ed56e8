"""What a run survives: faults injected into a real run of two ranks, and how long each took to detect and recover from.

    python benchmarks/faults.py table [--out FILE]             every fault of the table, one after the other
    python benchmarks/faults.py random --count 50 [--seed 0]   this many faults, at random, in one run
    sudo python benchmarks/faults.py link [--cut 30]           two "hosts" in network namespaces, the wire cut

Each compares the losses, norms and rates of the finished run with those of an undisturbed run, bit for bit, and looks
for processes, shared memory and ports left behind. A fault is injected by the rank it hits: this file is imported first
by the run's launcher (`sitecustomize`), from which the ranks are forked.
`detected_s` is from the fault to the launcher's event that names it, `recovered_s` from there until training goes on.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_kinds import KINDS, at_random, spread
from fault_runs import Run


def compare(quiet: Run, hurt: Run, start: Callable[[Run], Any]) -> dict[str, Any]:
    """Run both to the end; what differs, and what was left behind."""
    codes = [quiet.finish(start), hurt.finish(start, timeout_s=3600.0)]
    assert codes == [0, 0], (hurt.folder / "out").read_text()
    rows = list(zip(quiet.numbers(), hurt.numbers(), strict=True))
    return {
        "exit_codes": codes,
        "rows_compared": len(rows),
        "rows_that_differ": sum(a != b for a, b in rows),
        "faults": hurt.outcomes(),
        "restarts": sum(event["kind"] == "restart" for event in hurt.events()),
        "rewinds": sum(event["kind"] == "rewind" for event in hurt.events()),
        "left": hurt.traces.left(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "random", "link"))
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cut", type=float, default=30.0, help="seconds the wire is cut for")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.what == "link":
            from fault_link import cut_link

            result = cut_link(folder, given.cut)
        else:
            kinds = ["rendezvous port taken", *KINDS, "agent killed"]
            faults = spread(kinds, apart=6) if given.what == "table" else at_random(given.count, given.seed)
            steps = faults[-1].step + 10
            quiet, hurt = Run(folder / "quiet", steps, []), Run(folder / "hurt", steps, faults)
            result = compare(quiet, hurt, Run.start)
    report = {"date": time.strftime("%Y-%m-%d"), "what": given.what, **result}
    report["seconds"] = round(time.monotonic() - began, 1)
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    sys.stdout.write(text)
    if given.out:
        given.out.write_text(text)
    sys.exit(bool(report["rows_that_differ"]) or any(report["left"].values()))


if __name__ == "__main__":
    main()
