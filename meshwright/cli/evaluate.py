"""`meshwright eval`: evaluate a trained run on texts."""

from pathlib import Path

import typer

from meshwright.cli.job import JSON, TRUST

DATA = typer.Option([], "--data", metavar="[NAME=]SOURCE", help="A prepared folder, file or folder; may be repeated.")


def evaluate(
    run: Path = typer.Argument(help="A run folder."),
    data: list[str] = DATA,
    batches: int | None = typer.Option(None, "--batches", min=1, help="Global batches per text; all by default."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda or cuda:N."),
    trust: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Evaluate a run's newest weights on texts; by default on its own held-out text."""
    from dataclasses import asdict

    from meshwright.cli.output import print_json, stderr_console, stdout_console
    from meshwright.runs.evaluate import evaluate_run

    with stderr_console().status("evaluating"):
        scores, step = evaluate_run(run, _named(data), device, batches, trust)
    if as_json:
        print_json({"run": str(run), "step": step, "sets": {name: asdict(found) for name, found in scores.items()}})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title=f"{run}, step {step}", title_justify="left")
    for column in ("text", "loss", "perplexity", "bits per byte", "tokens"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for name, found in scores.items():
        bits = "–" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
        table.add_row(name, f"{found.loss:.4f}", f"{found.perplexity:,.2f}", bits, f"{found.tokens:,}")
    stdout_console().print(table)


def _named(data: list[str]) -> dict[str, str]:
    """Map each text's name to its source; the default name is that of the file or folder."""
    from meshwright.errors import UserError

    named: dict[str, str] = {}
    for entry in data:
        name, equals, source = entry.partition("=")
        if not equals or "/" in name or not source:
            name, source = Path(entry).name or entry, entry
        if name in named:
            raise UserError(f'--data gives two texts the name "{name}"; rename one with NAME=SOURCE')
        named[name] = source
    return named
