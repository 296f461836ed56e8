"""Predict all measured runs again: the table behind the planner's intervals, and the page of its accuracy.

    python scripts/plan_evidence.py             # after a change of the planner's formulas or of the evidence
    python scripts/plan_evidence.py --check     # whether the table still agrees with the formulas; exit code 1 if not

writes meshwright/plan/residuals.json and docs/accuracy.md from benchmarks/evidence/ and the results named below. Only
the profile that comes with the package is used. About ten seconds on one core.
"""

import argparse
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from math import log
from pathlib import Path

from meshwright.plan import accuracy_page, validate
from meshwright.plan.coverage import made_residuals
from meshwright.plan.residuals import FILE, Residual, residuals
from meshwright.plan.traits import Traits

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "benchmarks" / "evidence"
FILES = [
    EVIDENCE / f"{name}.csv"
    for name in ("published_runs", "published_memory", "published_amd", "published_moe", "own_h200")
]
RECORDED = {
    "cpuxeon": "2026-11-16-cpu-calibrate-xeon-2cores.json",
    "cpuarm": "2026-11-17-cpu-calibrate-arm-2cores.json",
}
"""Plans for CPUs, which were compared where they were calibrated."""
OUTDATED = {"cpuxeon": ("ranks", "fp16", "bf16")}
"""Jobs, by a word of theirs, whose predictions rest on what is measured otherwise now."""


def recorded() -> Iterator[Residual]:
    """Runs whose predictions cannot be made here."""
    for source, name in RECORDED.items():
        rounds = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))["rounds"]
        for place, one in enumerate(rounds[0], start=1):
            words = one["job"]
            if any(word in words for word in OUTDATED.get(source, ())):
                continue
            axes = frozenset({"zero"} if "zero" in words and "zero 0" not in words else ())
            precision = "16-bit" if "fp16" in words or "bf16" in words else "fp32"
            traits = Traits("cpu", one["ranks"], True, True, axes, "eager", precision)
            predicted, measured = one["parts"]["peak memory"]
            errors = log(one["measured_s"] / one["predicted_s"]), log(measured / predicted)
            yield Residual(f"{source}-{place:03}", source, traits, *errors, recorded=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check

    with tempfile.TemporaryDirectory() as empty:
        os.environ["MESHWRIGHT_PROFILES"] = empty  # this machine's own would change the figures
        found = validate(FILES)
        names = tomllib.loads((EVIDENCE / "sources.toml").read_text(encoding="utf-8"))
        table = made_residuals(found.outcomes, recorded(), names)
        path, page = ROOT / "meshwright" / "plan" / FILE, ROOT / "docs" / "accuracy.md"
        if check:
            same = path.read_text(encoding="utf-8") == table.text()
            print(f"{FILE} agrees with the formulas" if same else f"{FILE} is of other formulas; run without --check")
            return 0 if same else 1
        path.write_text(table.text(), encoding="utf-8")
        residuals.cache_clear()
        summary = found.summary()
        page.write_text(accuracy_page(summary, [file.name for file in FILES]), encoding="utf-8")
    for kind in ("time", "memory"):
        held = summary["coverage"][kind]["all"]
        print(f"{kind}: {held['inside']} of {held['rows']} published rows in their interval ({held['share']:.1%})")
    print(f"wrote {path.relative_to(ROOT)} ({len(table.rows)} rows) and {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
