"""`meshwright schedule`: look at pipeline schedules before running them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.job import FORCE, JSON

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from meshwright.pipeline import Simulation, Table

    Run = tuple[Table, Simulation]

app = typer.Typer(help="Look at pipeline schedules.", no_args_is_help=True)

_STYLES = {"F": "white on blue", "B": "white on green", "I": "black on cyan", "W": "black on yellow"}
_STYLES |= {letter.lower(): style + " dim" for letter, style in _STYLES.items()} | {"&": "white on magenta"}
_PLAIN_COLUMNS = 200  # where no terminal would wrap them


@app.command()
def show(
    pp: int = typer.Option(4, "--pp", help="Pipeline ranks."),
    micro_batches: int = typer.Option(8, "--micro-batches", help="Micro-batches per step."),
    schedule: str = typer.Option("1f1b", "--schedule", help="The name of a schedule, or all."),
    virtual_stages: int | None = typer.Option(
        None, "--virtual-stages", help="Stages per rank; by default the schedule's own."
    ),
    forward: float = typer.Option(1.0, "--forward", help="Time of a micro-batch's forward through a rank's layers."),
    backward: float | None = typer.Option(
        None, "--backward", help="Time of its whole backward; by default input + weight."
    ),
    input_: float = typer.Option(1.0, "--input", help="Time of the input-gradient half of its backward."),
    weight: float = typer.Option(1.0, "--weight", help="Time of the weight-gradient half of its backward."),
    send: float = typer.Option(0.0, "--send", help="Time of a transfer between two ranks."),
    overlap: float | None = typer.Option(
        None,
        "--overlap",
        help="DualPipe's overlapped pairs: time relative to the sum of both; by default not overlapped.",
    ),
    svg: Path | None = typer.Option(None, "--svg", help="Write a picture here."),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Draw a pipeline schedule, or all of them, and print what it costs; times are in any unit."""
    from meshwright.cli.output import print_json, require_new, stdout_console, write_file
    from meshwright.errors import UserError
    from meshwright.pipeline import SCHEDULES, build_table, gantt_svg, share_times, simulate

    require_new(svg, "--svg", force)
    given = {"--forward": forward, "--backward": backward, "--input": input_, "--weight": weight, "--overlap": overlap}
    for flag, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{flag} = {value:g} is not a valid time for an action; give a number greater than 0")
    if not 0 <= send < float("inf"):
        raise UserError(f"--send = {send:g} is not a valid time for a transfer; give 0 or more")

    runs: list[Run] = []
    refused: dict[str, str] = {}
    for name in SCHEDULES if schedule == "all" else (schedule,):
        try:
            table = build_table(name, pp, micro_batches, virtual_stages)
        except UserError as error:
            if schedule != "all":
                raise
            refused[name] = str(error)
            continue
        times = share_times(
            table,
            forward_s=forward,
            backward_s=backward,
            input_s=input_,
            weight_s=weight,
            send_s=send,
            overlap=overlap,
        )
        runs.append((table, simulate(table, times)))
    if not runs:
        raise UserError(next(iter(refused.values())))

    if svg:
        write_file(svg, gantt_svg(runs), "--svg")
    if as_json:
        print_json({"schedules": [_row(*run) for run in runs], "refused": refused})
    else:
        _print(stdout_console(), runs, refused)


def _row(table: "Table", simulation: "Simulation") -> dict[str, Any]:
    return {
        "schedule": table.schedule,
        "ranks": table.ranks,
        "virtual_stages": table.virtual_stages,
        "micro_batches": table.micro_batches,
        "stage_ranks": table.stage_ranks,
        "makespan": simulation.makespan_s,
        "ideal": simulation.ideal_s,
        "bubble": simulation.bubble_s,
        "bubble_over_ideal": simulation.bubble_over_ideal,
        "bubble_share_of_step": simulation.bubble_share_of_step,
        "busy": simulation.busy_s,
        "idle": simulation.idle_s,
        "in_flight": simulation.in_flight,
        "in_flight_input": simulation.in_flight_input,
        "stage_size": table.stage_size,
        "parameter_copies": table.parameter_copies,
        "weight_versions": table.weight_versions,
        "transfers": table.transfers,
        "actions": [
            {
                "rank": span.rank,
                "start": span.start_s,
                "end": span.end_s,
                "action": span.action.kind.value,
                "micro_batch": span.action.micro_batch,
                "stage": span.action.stage,
            }
            for span in simulation.spans
        ],
    }


def _print(console: "Console", runs: "list[Run]", refused: dict[str, str]) -> None:
    from rich.text import Text

    from meshwright.pipeline import column_time, gantt_lines

    label = len(f"rank {runs[0][0].ranks - 1}  ")
    columns = (console.width if console.is_terminal else _PLAIN_COLUMNS) - label
    column = column_time([simulation for _, simulation in runs], columns)

    def line(text: "str | Text" = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for table, simulation in runs:
        line(Text(_headline(table), style="bold"))
        for rank, lines in enumerate(gantt_lines(table, simulation, column)):
            for name, text in zip((f"rank {rank}", ""), _coloured(*lines, columns), strict=True):
                line(Text(name.ljust(label)) + text)
        for sentence in _figures(table, simulation):
            line(sentence)
        line()
    for reason in refused.values():
        line(f"left out: {reason}")
    line(
        f"a column is {column:g}; F forward, B backward, I and W its halves (input, weights), lowercase on a "
        f"rank's later stages, · idle, & overlapped; below each letter the last digit of its micro-batch"
    )


def _coloured(letters: str, numbers: str, columns: int) -> "list[Text]":
    """Both lines of a rank in the colours of their letters, cut at the end of the drawing."""
    from rich.text import Text

    lines = []
    for shown in (letters, numbers):
        text = Text()
        for letter, character in list(zip(letters, shown, strict=True))[:columns]:
            text.append(character, style=_STYLES.get(letter, "dim"))
        lines.append(text)
    if len(letters) > columns:
        lines[0].append("…")
    return lines


def _headline(table: "Table") -> str:
    stages = "1 stage" if table.virtual_stages == 1 else f"{table.virtual_stages} stages"
    return f"{table.schedule}: {table.ranks} ranks, {stages} per rank, {table.micro_batches} micro-batches"


def _figures(table: "Table", simulation: "Simulation") -> list[str]:
    held = " ".join(f"{table.stage_size * count:.3g}" for count in simulation.in_flight)
    until_input = " ".join(f"{table.stage_size * count:.3g}" for count in simulation.in_flight_input)
    split = f" (until the input gradient: {until_input})" if table.splits_backward else ""
    lines = [
        f"takes {simulation.makespan_s:g}; bubble {simulation.bubble_s:g}: {simulation.bubble_over_ideal:.1%} over "
        f"ideal time, {simulation.bubble_share_of_step:.1%} of the step",
        f"in flight per rank, in micro-batches of a rank's share: {held}{split}",
        f"parameter copies {table.parameter_copies}, transfers between ranks {table.transfers}",
    ]
    if max(table.weight_versions) > 1:
        lines[-1] += f", weight versions per rank {' '.join(map(str, table.weight_versions))}"
    return lines
