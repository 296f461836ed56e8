"""`meshwright verify JOB --run`: check that a run, resumed in other layouts, equals that of a single process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from meshwright.cli.verify_verdict import as_row, print_verdict, say
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.job import LoadedJob
    from meshwright.verify.run_plan import Leg


def verify_run(loaded: LoadedJob, steps: int, dtype: str, device: str, strict: bool, as_json: bool) -> bool:
    """Run a shrunken job through `train` and print the comparison; return whether it is equal."""
    from meshwright.cli.output import print_json, stderr_console, stdout_console
    from meshwright.launch.worker import run_quietly
    from meshwright.layout import ranks_of, require_layout
    from meshwright.verify import RankError
    from meshwright.verify.run_check import check_run
    from meshwright.verify.run_compare import ROUNDING
    from meshwright.verify.run_plan import legs_of, small_run
    from meshwright.verify.run_text import is_prepared_data

    if dtype not in ROUNDING:
        raise UserError(f"--dtype {dtype} has no error bounds for runs; use {' or '.join(ROUNDING)} with --run")
    if device != "cpu":
        raise UserError(f"--device {device}: runs are verified on the CPU; leave it out with --run")
    require_layout(loaded.job, ranks_of(loaded.job.layout))
    small, changes = small_run(loaded.job, steps)
    legs = legs_of(small)
    hiding = [change.text for change in changes if change.hides]
    with stderr_console().status(f"{_path(legs)}, {steps} steps in {dtype}, against one process"):
        try:
            verdict = check_run(small, run_quietly, dtype, is_prepared_data(loaded.job.data))
        except RankError as error:
            print(f"meshwright: {error}", file=sys.stderr)
            return False
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
                "notes": [change.text for change in changes],
                "could_hide_errors": hiding,
                "first_wrong": None if first is None else as_row(first),
                "rows": [as_row(row) for row in verdict.rows],
            }
        )
    else:
        console = stdout_console()
        for change in changes:
            say(console, f"{'not checked' if change.hides else 'note'}  {change}")
        say(console, f"run   {_path(legs)}")
        print_verdict(console, verdict, "the run, its checkpoints and its resumes match one process")
        if strict and hiding:
            say(console, f"--strict: {len(hiding)} of the job's settings were not checked, see above")
    return False if strict and hiding else verdict.ok


def _path(legs: list[Leg]) -> str:
    return ", ".join(leg.name if not leg.start else f"resumed at step {leg.start} in {leg.name}" for leg in legs)
