"""`meshwright train`: train a job on this machine, in one process or with many ranks."""

import os
import shlex
from typing import TYPE_CHECKING

import typer

from meshwright.cli.job import JOB, JSON, SET, TRUST

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.ranks import Place
    from meshwright.runs.lifecycle import Finished


def train(
    job: str = JOB,
    overrides: list[str] = SET,
    nproc: int | None = typer.Option(None, "--nproc", min=1, help="Start this many ranks, one per GPU or CPU process."),
    resume: bool = typer.Option(
        False, "--resume", help="Continue the run in run.folder, or JOB itself if it is a run folder."
    ),
    nodes: int = typer.Option(
        1, "--nodes", min=1, help="Number of machines, with --nproc ranks each; run the command on every one."
    ),
    node_rank: int = typer.Option(0, "--node-rank", min=0, help="Which of the machines this is."),
    master: str | None = typer.Option(
        None, "--master", metavar="HOST:PORT", help="Rendezvous address of the machines."
    ),
    trust: bool = TRUST,
    quiet: bool = typer.Option(False, "--quiet", help="Print nothing but errors, and what --json prints."),
    as_json: bool = JSON,
) -> None:
    """Train a job on this machine's CPU or GPUs; inside torchrun or srun it runs as one of the ranks."""
    from meshwright.cli.output import rank_failures_told, stderr_console, stdout_console
    from meshwright.errors import UserError
    from meshwright.ranks import own_place

    if master is not None:
        _as_node(job, overrides, resume, trust, nproc, (node_rank, nodes, master), quiet)
        return
    if nodes > 1:
        raise UserError(f"--nodes {nodes} needs --master HOST:PORT, the rendezvous address; give it on every machine")
    place = own_place()
    console = stderr_console() if as_json else stdout_console()
    console.quiet = quiet
    if place is not None:
        if nproc is not None:
            raise UserError(f"--nproc {nproc} would start ranks inside rank {place.rank} of {place.size}; leave it out")
        with rank_failures_told():
            _as_rank(job, overrides, resume, trust, place, console, as_json)
    elif nproc is not None and nproc > 1:
        _with_ranks(job, overrides, resume, trust, nproc, console, as_json)
    else:
        _alone(job, overrides, resume, trust, console, as_json)


def _alone(job: str, overrides: list[str], resume: bool, trust: bool, console: "Console", as_json: bool) -> None:
    from meshwright.job import load_job

    loaded = load_job(job, overrides, trust=trust)
    if loaded.job.run.max_restarts or loaded.job.run.watchdog_s:  # a parent must outlive the training process
        _with_ranks(job, overrides, resume, trust, 1, console, as_json)
        return

    from meshwright.api.training import write_report
    from meshwright.launch.signals import exit_code
    from meshwright.launch.worker import run_job

    finished = run_job(loaded, console, on_end=write_report, resume=resume)
    _show(finished, console, as_json)
    if finished.outcome.reason == "interrupted":
        raise typer.Exit(exit_code(finished.signal))


def _with_ranks(
    job: str, overrides: list[str], resume: bool, trust: bool, nproc: int, console: "Console", as_json: bool
) -> None:
    from meshwright.job import hub_name, load_job

    loaded = load_job(job, overrides, trust=trust)

    from meshwright.api.training import write_report
    from meshwright.cli.output import rank_failures_told
    from meshwright.launch.elastic import launch
    from meshwright.launch.signals import exit_code

    words = ["train", job, *(word for override in overrides for word in ("--set", override))]
    if (start := loaded.job.model.init_from) is not None and hub_name(start) is not None:
        words += ["--set", f"model.init_from={start}"]  # the commit found now, in every rank and restart
    words += ["--resume"] * resume + ["--trust"] * trust + ["--quiet"] * console.quiet + ["--json"] * as_json
    with rank_failures_told():
        folder = launch(loaded, nproc, words, console, on_end=write_report, resume=resume)
    if folder.state() == "stopped":
        raise typer.Exit(exit_code(folder.stop_signal()))


def _as_node(
    job: str,
    overrides: list[str],
    resume: bool,
    trust: bool,
    nproc: int | None,
    place: tuple[int, int, str],
    quiet: bool,
) -> None:
    from meshwright.errors import UserError
    from meshwright.job import load_job
    from meshwright.launch.nodes import Node

    node = Node(*place)
    if nproc is None or not resume:
        raise UserError("--master starts one machine's ranks of an existing run; add --nproc and --resume")
    loaded = load_job(job, overrides, trust=trust)

    from meshwright.api.training import write_report
    from meshwright.cli.output import rank_failures_told
    from meshwright.launch.multi_node import launch_node
    from meshwright.launch.signals import exit_code

    words = ["train", job, *(word for override in overrides for word in ("--set", override)), "--resume"]
    words += ["--trust"] * trust + ["--quiet"] * quiet
    with rank_failures_told():
        folder = launch_node(loaded, nproc, node, words, on_end=write_report)
    if folder.state() == "stopped" and node.rank == 0:  # one exit code for all nodes: a scheduler takes the largest
        raise typer.Exit(exit_code(folder.stop_signal()))


def _as_rank(
    job: str, overrides: list[str], resume: bool, trust: bool, place: "Place", console: "Console", as_json: bool
) -> None:
    from meshwright.api.training import write_report
    from meshwright.errors import UserError
    from meshwright.job import load_job
    from meshwright.launch.failures import failures_written_down, leave
    from meshwright.launch.signals import exit_code
    from meshwright.launch.worker import RUN_FOLDER, run_job
    from meshwright.runs.rank_zero import SharedRefusal

    console.quiet = console.quiet or place.rank > 0
    launched = RUN_FOLDER in os.environ
    try:
        with failures_written_down():
            try:
                loaded = load_job(job, overrides, trust=trust)
            except UserError as error:
                raise SharedRefusal(str(error)) from None
            finished = run_job(loaded, console, place, on_end=write_report, resume=resume)
    except Exception as error:
        code = 2 if isinstance(error, UserError) else 1
        if launched:
            leave(code)
        if place.rank > 0 and isinstance(error, SharedRefusal):  # rank 0 reports it
            raise typer.Exit(code) from None
        raise
    if place.rank == 0:
        _show(finished, console, as_json)
    if finished.outcome.reason == "interrupted" and not launched:  # launchers treat any other exit code as a failure
        raise typer.Exit(exit_code(finished.signal))


def _show(finished: "Finished", console: "Console", as_json: bool) -> None:
    from dataclasses import asdict

    from meshwright.cli.output import print_json

    report = finished.folder / "report.html"
    outcome = finished.outcome
    if as_json:
        print_json({"folder": str(finished.folder), "report": str(report), **asdict(outcome)})
        return
    if outcome.sample:
        console.rule("a sample")
        console.print(outcome.sample, markup=False, highlight=False, soft_wrap=True)
        console.rule()
    first = "" if outcome.first_val_loss is None else f"{outcome.first_val_loss:.4f} → {outcome.val_loss:.4f}"
    console.print(
        f"{outcome.reason} at step {outcome.step}"
        + (f" · validation loss {first}" if first else "")
        + (f" · {outcome.tokens_per_s:,.0f} tokens/s" if outcome.tokens_per_s else "")
        + f"\nreport   {report}"
        + (f"\ncontinue {command}" if (command := _next(finished)) else ""),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _next(finished: "Finished") -> str | None:
    """The command to continue with; a run on tokens without text cannot generate."""
    if finished.outcome.reason == "interrupted":
        return f"meshwright train {shlex.quote(str(finished.folder))} --resume"
    if (finished.folder / "tokenizer.json").is_file():
        return f"meshwright generate {shlex.quote(str(finished.folder))} --prompt 'class '"
    return None
