"""`meshwright rehearse`: one rank of the cluster's job, at full size, on the one device that is here."""

import sys
from dataclasses import replace
from pathlib import Path

import typer

from meshwright.cli.job import JOB, JSON, SET, TRUST

RANK = typer.Option(None, "--rank", help="The rank to run; by default the one that the plan says is fullest.")
EACH = typer.Option(False, "--each-stage", help="Run one rank of every kind: first, middle and last stage.")
CLUSTER = typer.Option(
    None, "--cluster", help="Where the job will run: 64xh100, 16x8xa100-80gb; else the job's [cluster]."
)
CHECKPOINT = typer.Option(True, help="Whether to write the rank's share of a checkpoint to the temporary folder.")
OUT = typer.Option(None, "--out", metavar="FOLDER", help="Save the rehearsal here, as a run folder of its own kind.")


def rehearse(
    job: str = JOB,
    overrides: list[str] = SET,
    rank: int | None = RANK,
    each_stage: bool = EACH,
    steps: int = typer.Option(3, "--steps", min=1, help="Steps to time."),
    warmup: int = typer.Option(2, "--warmup", min=2, help="Warm-up steps, not timed."),
    cluster: str | None = CLUSTER,
    profile: bool = typer.Option(False, "--profile", help="Also report which kernels take the time."),
    checkpoint: bool = CHECKPOINT,
    out: Path | None = OUT,
    trust: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Run one rank of a job's world here, with the other ranks' messages replaced: memory, compute and messages."""
    from meshwright.cli.output import print_json, stderr_console
    from meshwright.cli.rehearse_text import rehearsal_text
    from meshwright.errors import print_error
    from meshwright.job import load_job
    from meshwright.rehearse.folder import require_free, save_rehearsal

    if out is not None:
        require_free(out)
    loaded = load_job(job, overrides, trust=trust)

    from meshwright.rehearse.apart import RehearsalFailed
    from meshwright.rehearse.run import rehearse as run
    from meshwright.rehearse.run import resolved_for_rehearsal

    loaded = replace(loaded, job=resolved_for_rehearsal(loaded.job, cluster))

    asked = {"cluster": cluster, "rank": rank, "each_stage": each_stage, "steps": steps, "warmup": warmup}
    try:
        with stderr_console().status("rehearsing") as status:
            options = {**asked, "profile": profile, "checkpoint": checkpoint}
            found = run(loaded.job, **options, report=status.update)  # type: ignore[arg-type]
    except RehearsalFailed as failure:
        if "--debug" in sys.argv:
            print(failure.traceback, file=sys.stderr)
        print_error(failure)
        raise typer.Exit(1) from None
    if out is not None:
        save_rehearsal(out, loaded, found, sys.argv)
    if as_json:
        print_json(found.to_json())
    else:
        print(rehearsal_text(found), end="")
    if any(one.state == "out of memory" for one in found.ranks):
        raise typer.Exit(1)
