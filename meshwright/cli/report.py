"""`meshwright report`: a run as one page."""

from pathlib import Path

import typer

from meshwright.cli.job import JSON


def report(
    run: Path = typer.Argument(help="A run folder."),
    out: Path | None = typer.Option(None, "--out", help="Where to write it; RUN/report.html when not given."),
    as_json: bool = JSON,
) -> None:
    """Write a run's report: one file that opens in any browser without a network."""
    from meshwright.cli.output import print_json
    from meshwright.studio import write_report

    path = write_report(run, out)
    if as_json:
        print_json({"report": str(path)})
    else:
        print(path)
