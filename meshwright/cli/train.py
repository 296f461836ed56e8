"""`meshwright train`: train a job on this machine."""

import typer

from meshwright.cli.job import JOB, JSON, SET


def train(job: str = JOB, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Train a job on this machine's CPU or GPU."""
    from dataclasses import asdict

    from meshwright.cli.output import print_json, stderr_console, stdout_console
    from meshwright.job import load_job

    loaded = load_job(job, overrides)

    from meshwright.launch.local import run_local
    from meshwright.studio import write_report

    console = stderr_console() if as_json else stdout_console()
    finished = run_local(loaded, console, on_end=write_report)
    report = finished.folder / "report.html"
    outcome = finished.outcome
    if as_json:
        print_json({"folder": str(finished.folder), "report": str(report), **asdict(outcome)})
    else:
        if outcome.sample:
            console.rule("a sample")
            console.print(outcome.sample, markup=False, highlight=False, soft_wrap=True)
            console.rule()
        first = "" if outcome.first_val_loss is None else f"{outcome.first_val_loss:.4f} → {outcome.val_loss:.4f}"
        console.print(
            f"{outcome.reason} at step {outcome.step}"
            + (f" · validation loss {first}" if first else "")
            + (f" · {outcome.tokens_per_s:,.0f} tokens/s" if outcome.tokens_per_s else "")
            + f"\nreport   {report}\ncontinue meshwright generate {finished.folder} --prompt 'class '",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if outcome.reason == "interrupted":
        raise typer.Exit(130)
