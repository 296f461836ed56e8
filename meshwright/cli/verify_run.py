"""`meshwright verify JOB --run`: check that a run, resumed in other layouts, equals that of a single process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cli.verify_verdict import as_row, print_verdict, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.job import LoadedJob
    from meshwright.verify.run_plan import Leg


def verify_run(loaded: LoadedJob, steps: int, dtype: str, device: str, strict: bool, as_json: bool) -> bool:
    """Run a shrunken job through `train` and print the comparison; return whether it is equal."""
    from meshwright.api import verify as verified
    from meshwright.cli.output import print_json, stderr_console, stdout_console
    from meshwright.errors import print_error
    from meshwright.layout import ranks_of
    from meshwright.verify import RankError

    with stderr_console().status(f"the run through its layouts, {steps} steps in {dtype}, against one process"):
        try:
            report = verified(loaded, steps=steps, dtype=dtype, device=device, run=True)
        except RankError as error:
            print_error(error)
            return False
    verdict, legs, hiding = report.verdict, report.legs, report.not_checked
    first = verdict.first_wrong
    if as_json:
        print_json(
            {
                "equal": verdict.equal,
                "job": loaded.name,
                "legs": [{"layout": leg.name, "ranks": ranks_of(leg.job.layout), "start": leg.start} for leg in legs],
                "dtype": dtype,
                "steps": steps,
                "seconds": verdict.seconds,
                "notes": report.notes,
                "could_hide_errors": hiding,
                "first_wrong": None if first is None else as_row(first),
                "rows": [as_row(row) for row in verdict.rows],
            }
        )
    else:
        console = stdout_console()
        for change in report.changes:
            say(console, f"{'not checked' if change.hides else 'note'}  {change}")
        say(console, f"run   {_path(legs)}")
        print_verdict(console, verdict, "equal: the run, its checkpoints and its resumes match one process")
        if strict and hiding:
            say(console, f"--strict: {len(hiding)} of the job's settings were not checked, see above")
    return False if strict and hiding else verdict.ok


def _path(legs: Sequence[Leg]) -> str:
    return ", ".join(leg.name if not leg.start else f"resumed at step {leg.start} in {leg.name}" for leg in legs)
