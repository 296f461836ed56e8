"""`meshwright tune`: find a job's fastest settings on this machine by measuring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.job import FORCE, JOB, JSON, SET, TRUST

if TYPE_CHECKING:
    from meshwright.measure import Tried

WRITE = typer.Option(None, "--write", metavar="JOB.toml", help="Write the job with the fastest settings.")
OUT = typer.Option(None, "--out", metavar="FILE", help="Where results are saved; a second call continues from there.")


def tune(
    job: str = JOB,
    overrides: list[str] = SET,
    best: int = typer.Option(4, "--best", min=1, help="Number of the planner's settings to run."),
    steps: int = typer.Option(6, "--steps", min=1, help="Steps to time in each run."),
    warmup: int = typer.Option(3, "--warmup", min=1, help="Warm-up steps, not timed."),
    nproc: int | None = typer.Option(None, "--nproc", min=1, help="Ranks per run."),
    write: Path | None = WRITE,
    force: bool = FORCE,
    out: Path | None = OUT,
    trust: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Find the micro-batch, recomputation and loader that are fastest here: predicted, then measured in short runs."""
    from dataclasses import asdict

    from meshwright.cli.output import print_json, require_new, stderr_console, stdout_console, write_file
    from meshwright.job import load_job
    from meshwright.measure import tune as measured
    from meshwright.plan import job_text
    from meshwright.train import choose_device, device_name

    require_new(write, "--write", force)
    loaded = load_job(job, overrides, trust=trust)
    device = choose_device(loaded.job)
    console = stderr_console() if as_json else stdout_console()
    file = out or Path(f"tune-{Path(job).stem}.jsonl")
    ranks = () if nproc is None else ("--nproc", str(nproc))
    arguments = ("--steps", str(steps), "--warmup", str(warmup), *ranks, *["--trust"] * trust)
    console.print(f"{'setting':58} {'predicted':>11} {'tokens/s':>11} {'MFU':>7} {'GiB':>7}", highlight=False)

    def report(one: Tried) -> None:
        console.print(_line(one), markup=False, highlight=False, soft_wrap=True)

    found = measured(
        job, overrides, device_name(device), nproc or 1, file, best=best, arguments=arguments, report=report
    )
    if write is not None:
        chosen = load_job(job, [*overrides, *found.best], trust=trust).job
        write_file(write, job_text(chosen, f"tuned from {job}: {found.verdict}"), "--write")
    if as_json:
        tried = [asdict(one) for one in found.tried]
        print_json({"best": list(found.best), "verdict": found.verdict, "tried": tried, "file": str(file)})
        return
    fastest = " ".join(found.best) or "the original job"
    console.print(f"fastest: {fastest}: {found.verdict}", markup=False, highlight=False, soft_wrap=True)


def _line(one: Tried) -> str:
    def shown(value: Any, form: str) -> str:
        return "–" if value is None else format(value, form)

    name = " ".join(one.setting) or one.part
    if one.samples_per_s is not None and one.step_s is not None:
        wait = f"loader alone {one.samples_per_s:,.1f} samples/s; a step of {1e3 * one.step_s:.1f} ms would wait"
        return f"{name:58} {wait} {one.wait_share or 0.0:.1%}"
    peak = None if one.peak_bytes is None else one.peak_bytes / 2**30
    figures = f"{shown(one.predicted_tokens_per_s, ',.0f'):>11} {shown(one.tokens_per_s, ',.0f'):>11}"
    rest = f"{shown(one.mfu, '.1%'):>7} {shown(peak, '.2f'):>7}"
    return f"{name:58} {figures} {rest}" + ("" if one.state == "measured" else f"  {one.state}: {one.why}")
