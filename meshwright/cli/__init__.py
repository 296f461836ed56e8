"""The command line: one thin function per command, over one room. Rooms are imported inside the commands, so that
`--help` stays instant and imports no torch."""

import sys
import warnings
from typing import Any

import typer

from meshwright.cli import (
    bench,
    calibrate,
    chat,
    checkpoint,
    data,
    doctor,
    evaluate,
    generate,
    job,
    plan,
    rehearse,
    replay,
    report,
    schedule,
    studio,
    submit,
    train,
    tune,
    verify,
)
from meshwright.cli.os_errors import refusals_of_the_system, require_address_space, require_text, require_utf8
from meshwright.errors import UserError, print_error
from meshwright.ranks import is_first_rank
from meshwright.version import VERSION

app = typer.Typer(
    name="meshwright",
    help="Plan, verify and run LLM training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich reads [cluster] in a help text as a style, and importing it doubles --help's time
    context_settings={"max_content_width": 120},
    epilog="Exit codes: 0 ok, 1 a check failed, 2 an error you can fix, 85 stopped by a signal, 130 by Ctrl-C.",
)
app.add_typer(job.app, name="job")
app.add_typer(data.app, name="data")
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("verify")(verify.verify)
app.command("rehearse")(rehearse.rehearse)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("eval")(evaluate.evaluate)
app.command("calibrate")(calibrate.calibrate)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("replay")(replay.replay)
app.command("report")(report.report)
app.command("studio")(studio.studio)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(schedule.app, name="schedule")
app.command("submit")(submit.submit)
app.command("status")(submit.status)
app.command("logs")(submit.logs)
app.command("cancel")(submit.cancel)
app.command("doctor")(doctor.doctor)


RUNS_TORCH = {"train", "verify", "bench", "tune", "eval", "generate", "chat", "calibrate", "replay", "rehearse"}
"""Commands that warn about a torch release newer than the newest one tested."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    shown: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks; works after the command's name too."),
) -> None:
    """Both options take effect before any command runs."""
    require_address_space(context.invoked_subcommand in RUNS_TORCH)
    if context.invoked_subcommand in RUNS_TORCH and is_first_rank():
        from importlib.metadata import version

        from meshwright.hardware.torch_versions import untested

        if note := untested(version("torch")):
            print_error(note)


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Print our own warnings as one line, on the first rank only; other warnings as Python prints them."""
    from meshwright.job.unused import JobWarning

    if not issubclass(category, JobWarning):
        _SHOW_WARNING(message, category, *place, **more)
    elif is_first_rank():
        print_error(f"warning: {message}")


_SHOW_WARNING = warnings.showwarning


def main() -> None:
    """Run the command line; a user error becomes one sentence and exit code 2, never a traceback."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    warnings.showwarning = _show_warning
    try:
        require_utf8()
        require_text(arguments)
        with refusals_of_the_system(arguments):
            app(arguments)
    except UserError as error:
        if debug:
            raise
        print_error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        if debug:
            raise
        print_error("interrupted")
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        print_error(f"internal error, {type(error).__name__}: {error}; run again with --debug and report it")
        sys.exit(1)
