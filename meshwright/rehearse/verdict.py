"""Run as a module inside the job that rehearses a run, this says whether the run may start: `… FOLDER` of that job."""

import json
import sys
from pathlib import Path
from typing import Any

from meshwright.atomic import write_atomic
from meshwright.errors import UserError
from meshwright.launch.slurm import FOLDER, REHEARSE, REHEARSED
from meshwright.rehearse.folder import read_rehearsal
from meshwright.rehearse.words import shortage, summary


def verdict(job: Path) -> dict[str, Any]:
    """Go or no-go after a rehearsal: no-go if a rank ran out of memory, or nothing was rehearsed."""
    try:
        rehearsal = read_rehearsal(job / Path(REHEARSED).relative_to(REHEARSE))
    except UserError as error:
        return {"go": False, "why": f"{error} (see its log in {job / FOLDER})"}
    if short := [shortage(rank, rehearsal) for rank in rehearsal.ranks if rank.state != "measured"]:
        return {"go": False, "why": "; ".join(short)}
    step_s = None if rehearsal.step is None else rehearsal.step.step_s
    return {"go": True, "why": summary(rehearsal), "step_s": step_s}


def _main(job: Path) -> int:
    report = verdict(job)
    write_atomic(job / FOLDER / "verdict.json", json.dumps(report, indent=2) + "\n")
    print(f"{'go' if report['go'] else 'no-go'}: {report['why']}")
    return 0 if report["go"] else 1


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
