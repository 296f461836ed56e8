"""`meshwright report`: a run, a rehearsal or a plan as one page."""

from pathlib import Path

import typer

from meshwright.cli.job import FORCE, JSON
from meshwright.cli.plan import CLUSTER


def report(
    what: str = typer.Argument(
        metavar="RUN|PLAN", help="The folder of a run or a rehearsal, or a job to show as a plan."
    ),
    out: Path | None = typer.Option(None, "--out", help="Where to write it; by default RUN/report.html or PLAN.html."),
    cluster: str | None = CLUSTER,
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Write a run's, a rehearsal's or a plan's report: one file that opens in any browser, offline."""
    from meshwright.cli.output import print_json, require_new
    from meshwright.errors import UserError
    from meshwright.runs.traces import traces_of
    from meshwright.studio import write_report

    folder = Path(what) if Path(what).is_dir() else None
    if out is None and folder is None:
        out = Path(f"{Path(what).stem}.html")
    require_new(out, "--out", force)
    if folder is not None:
        if cluster is not None:
            raise UserError(f"--cluster = {cluster} is for plans, and {what} is a folder; leave it out")
        path, traces = write_report(folder, out), traces_of(folder)
    else:
        assert out is not None
        path, traces = _plan(what, out, cluster), []
    if as_json:
        named = {"traces": [str(trace) for trace in traces]} if traces else {}
        print_json({"report": str(path)} | named)
    else:
        print(path)


def _plan(what: str, out: Path, cluster: str | None) -> Path:
    from meshwright.job import load_job
    from meshwright.plan import machines_of
    from meshwright.studio import write_plan_report

    job = load_job(what, [], trust=True).job  # none of its code is run
    return write_plan_report(job, machines_of(job, cluster), Path(what).stem, out)
