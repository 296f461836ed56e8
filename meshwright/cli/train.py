"""`meshwright train`: train a job on this machine, in one process or with many ranks."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.job import JOB, JSON, SET, TRUST

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.job import Job, LoadedJob
    from meshwright.ranks import Place
    from meshwright.runs.lifecycle import Finished
    from meshwright.train import TraceSteps


@dataclass(frozen=True)
class _Asked:
    """What the command line says about the run."""

    job: str
    overrides: list[str]
    resume: bool
    trust: bool
    trace: str | None
    nvtx: bool

    def load(self) -> "LoadedJob":
        from meshwright.job import load_job, require_base, require_data
        from meshwright.runs.rehearsed import require_training

        loaded = load_job(self.job, self.overrides, trust=self.trust)
        require_base(loaded.job)
        require_data(loaded.job.data, loaded.job.run.folder if self.resume else None)
        if loaded.job.run.folder is not None:
            require_training(Path(loaded.job.run.folder))  # before what its layout needs
        return loaded

    def steps(self, loaded: "LoadedJob") -> "TraceSteps | None":
        """The steps to trace; some the job does not have are refused."""
        from meshwright.errors import UserError

        if self.trace is None:
            if self.nvtx:
                raise UserError("--nvtx marks the steps of --trace for nsys; add --trace STEPS")
            return None
        from meshwright.train import TraceSteps

        return TraceSteps.parse(self.trace, loaded.job, nvtx=self.nvtx)

    def words(self, console: "Console", as_json: bool = False) -> list[str]:
        """The same for a rank."""
        words = ["train", self.job, *(word for override in self.overrides for word in ("--set", override))]
        words += [] if self.trace is None else ["--trace", self.trace]
        words += ["--resume"] * self.resume + ["--trust"] * self.trust + ["--nvtx"] * self.nvtx
        return words + ["--quiet"] * console.quiet + ["--json"] * as_json


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
    trace: str | None = typer.Option(
        None, "--trace", metavar="STEPS", help="Write a profile of these steps per rank, e.g. 10-12, for Perfetto."
    ),
    nvtx: bool = typer.Option(False, "--nvtx", help="Mark the steps of --trace for nsys instead of writing files."),
    trust: bool = TRUST,
    quiet: bool = typer.Option(False, "--quiet", help="Print nothing but errors, and what --json prints."),
    as_json: bool = JSON,
) -> None:
    """Train a job on this machine's CPU or GPUs; inside torchrun or srun it runs as one of the ranks."""
    from meshwright.cli.output import rank_failures_told, stderr_console, stdout_console
    from meshwright.errors import UserError
    from meshwright.ranks import own_place
    from meshwright.runs.output import lasting_streams

    asked = _Asked(job, overrides, resume, trust, trace, nvtx)
    console = stderr_console() if as_json else stdout_console()
    console.quiet = quiet
    with lasting_streams():
        if master is not None:
            _as_node(asked, nproc, (node_rank, nodes, master), console)
            return
        if nodes > 1:
            raise UserError(
                f"--nodes {nodes} needs --master HOST:PORT, the rendezvous address; give it on every machine"
            )
        place = own_place()
        if place is not None:
            if nproc is not None:
                raise UserError(
                    f"--nproc {nproc} would start ranks inside rank {place.rank} of {place.size}; leave it out"
                )
            with rank_failures_told():
                _as_rank(asked, place, console, as_json)
        elif nproc is not None and nproc > 1:
            _with_ranks(asked, nproc, console, as_json)
        else:
            _alone(asked, console, as_json)


def _alone(asked: _Asked, console: "Console", as_json: bool) -> None:
    loaded = asked.load()
    if loaded.job.run.max_restarts or loaded.job.run.watchdog_s:  # a parent must outlive the training process
        _with_ranks(asked, 1, console, as_json)
        return

    from meshwright.api.training import write_report
    from meshwright.launch.signals import exit_code
    from meshwright.launch.worker import run_job

    trace = asked.steps(loaded)
    finished = run_job(loaded, console, on_end=write_report, resume=asked.resume, trace=trace)
    _show(finished, loaded.job, console, as_json)
    if finished.outcome.reason == "interrupted":
        raise typer.Exit(exit_code(finished.signal))


def _with_ranks(asked: _Asked, nproc: int, console: "Console", as_json: bool) -> None:
    loaded = asked.load()
    asked.steps(loaded)  # refused before any rank starts

    from meshwright.api.training import write_report
    from meshwright.cli.output import rank_failures_told
    from meshwright.job import hub_name
    from meshwright.launch.elastic import launch
    from meshwright.launch.signals import exit_code

    words = asked.words(console, as_json)
    if (start := loaded.job.model.init_from) is not None and hub_name(start) is not None:
        words += ["--set", f"model.init_from={start}"]  # the commit found now, in every rank and restart
    with rank_failures_told():
        folder = launch(loaded, nproc, words, console, on_end=write_report, resume=asked.resume)
    if folder.state() == "stopped":
        raise typer.Exit(exit_code(folder.stop_signal()))


def _as_node(asked: _Asked, nproc: int | None, place: tuple[int, int, str], console: "Console") -> None:
    from meshwright.errors import UserError
    from meshwright.launch.nodes import Node

    node = Node(*place)
    if nproc is None or not asked.resume:
        raise UserError("--master starts one machine's ranks of a run on several; add --nproc and --resume")
    loaded = asked.load()
    asked.steps(loaded)

    from meshwright.api.training import write_report
    from meshwright.cli.output import rank_failures_told
    from meshwright.launch.multi_node import launch_node
    from meshwright.launch.signals import exit_code

    with rank_failures_told():
        folder = launch_node(loaded, nproc, node, asked.words(console), on_end=write_report)
    if folder.state() == "stopped":  # on every machine: a scheduler may look at each
        raise typer.Exit(exit_code(folder.stop_signal()))


def _as_rank(asked: _Asked, place: "Place", console: "Console", as_json: bool) -> None:
    from meshwright.api.training import write_report
    from meshwright.errors import UserError
    from meshwright.launch.failures import failures_written_down, leave
    from meshwright.launch.signals import exit_code
    from meshwright.launch.worker import RUN_FOLDER, run_job
    from meshwright.runs.rank_zero import SharedRefusal

    console.quiet = console.quiet or place.rank > 0
    launched = RUN_FOLDER in os.environ
    try:
        with failures_written_down():
            try:
                loaded = asked.load()
                trace = asked.steps(loaded)
            except UserError as error:
                raise SharedRefusal(str(error)) from None
            finished = run_job(loaded, console, place, on_end=write_report, resume=asked.resume, trace=trace)
    except Exception as error:
        code = 2 if isinstance(error, UserError) else 1
        if launched:
            leave(code)
        if place.rank > 0 and isinstance(error, SharedRefusal):  # rank 0 reports it
            raise typer.Exit(code) from None
        raise
    if place.rank == 0:
        _show(finished, loaded.job, console, as_json)
    if finished.outcome.reason == "interrupted" and not launched:  # launchers treat any other exit code as a failure
        raise typer.Exit(exit_code(finished.signal))


def _show(finished: "Finished", job: "Job", console: "Console", as_json: bool) -> None:
    from dataclasses import asdict

    from meshwright.cli.output import print_json
    from meshwright.runs.traces import VIEWERS, traces_of

    report = finished.folder / "report.html"
    outcome, traces = finished.outcome, traces_of(finished.folder)
    if as_json:
        named: dict[str, Any] = {"folder": str(finished.folder), "report": str(report)}
        if traces:
            named["traces"] = [str(path) for path in traces]
        print_json({**named, **asdict(outcome)})
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
        + (f"\nbackup   none: {outcome.backup_missing}" if outcome.backup_missing else "")
        + (f"\ntraces   {traces[0].parent}, for {VIEWERS}" if traces else "")
        + (f"\ncontinue {command}" if (command := _next(finished, job)) else ""),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _next(finished: "Finished", job: "Job") -> str | None:
    """The command to continue with; a run on tokens without text has none."""
    from meshwright.job import code_of
    from meshwright.layout import ranks_of
    from meshwright.runs import RunFolder

    run, ranks = shlex.quote(str(finished.folder)), ranks_of(job.layout)
    job = RunFolder.open(finished.folder).resolved_job(trust=True)
    trust = " --trust" if code_of(job) else ""  # which only the folder names from now on
    if finished.outcome.reason == "interrupted":
        return f"meshwright train {run} --resume{f' --nproc {ranks}' if ranks > 1 else ''}{trust}"
    if not (finished.folder / "tokenizer.json").is_file():
        return None
    if job.model.file is not None:  # which cannot generate
        return None if finished.outcome.val_loss is None else f"meshwright eval {run}{trust}"
    shown = " --image FILE" if job.model.vision else " --audio FILE" if job.model.audio else ""
    if (finished.folder / "chat_template.jinja").is_file():
        return f"meshwright chat {run}{shown}"
    return f"meshwright generate {run}{shown}" if shown else f"meshwright generate {run} --prompt 'class '"
