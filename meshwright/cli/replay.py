"""`meshwright replay`: recompute a step of a run, to see what was in it."""

from pathlib import Path

import typer

from meshwright.cli.job import JSON, TRUST


def replay(
    run: Path = typer.Argument(help="A run folder."),
    step: int = typer.Option(..., "--step", min=1, help="The step to recompute."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda or cuda:N."),
    trust: bool = TRUST,
    as_json: bool = JSON,
) -> None:
    """Recompute a step on one device: loss, gradient norm, and the loss of every sample, highest first."""
    from dataclasses import asdict

    from rich.table import Table
    from rich.text import Text

    from meshwright.cli.output import print_json, stderr_console, stdout_console
    from meshwright.runs.replay import replay as make_again

    found = make_again(run, step, device, stderr_console(), trust)
    if as_json:
        print_json(asdict(found))
        return
    console = stdout_console()
    recorded = "nothing" if found.recorded_loss is None else f"{found.recorded_loss} and {found.recorded_grad_norm}"
    console.print(
        f"step {found.step} from sample {found.position}: loss {found.loss}, gradient norm {found.grad_norm} "
        f"(recorded: {recorded}; weights of step {found.from_step} and the steps since)",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table("sample", "loss", "tokens", "text")
    for sample in found.samples:
        shown = "" if sample.text is None else repr(sample.text)[:60]
        cells = (str(sample.sample), f"{sample.loss:.4f}", str(sample.tokens), shown)
        table.add_row(*map(Text, cells))  # no markup: a text may contain brackets
    console.print(table)
