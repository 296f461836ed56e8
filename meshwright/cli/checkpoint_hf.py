"""`meshwright checkpoint import` and `export`: Hugging Face folders in and out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from meshwright.cli.job import JSON


def import_(
    folder: str = typer.Argument(help="A Hugging Face folder (config.json and safetensors), or a name: org/name."),
    out: Path = typer.Option(..., "--out", help="The run folder to create."),
    as_json: bool = JSON,
) -> None:
    """Create a run folder at step 0 from a Hugging Face folder or name; none of its files is ever executed."""
    from meshwright.cli.output import print_json, stderr_console
    from meshwright.runs.huggingface import fetched, import_folder
    from meshwright.runs.lifecycle import reporter

    folder = fetched(folder, reporter(stderr_console()))
    with _progress(f"importing {folder}") as report:
        done = import_folder(folder, out, report)
    if as_json:
        print_json({"source": str(folder), "run": str(out), "parameters": done.parameters, "bytes": done.bytes})
        return
    print(f"{out}: {done.parameters:,} parameters from {folder} as fp32, step 0")


def export(
    run: Path = typer.Argument(help="A run folder."),
    folder: Path = typer.Argument(help="The Hugging Face folder to create."),
    dtype: str = typer.Option("fp32", "--dtype", help="fp32 (exact), bf16, or nf4 or int8 as bitsandbytes."),
    adapter: bool = typer.Option(False, "--adapter", help="Write the run's adapters alone, as PEFT loads them."),
    as_json: bool = JSON,
) -> None:
    """Write a run's newest weights as a Hugging Face folder that transformers loads; adapters are merged into them."""
    from dataclasses import asdict

    from meshwright.cli.output import print_json
    from meshwright.runs.huggingface import export_run, export_run_adapter

    if adapter:
        step, size = export_run_adapter(run, folder)
        if as_json:
            print_json({"run": str(run), "folder": str(folder), "step": step, "bytes": size})
        else:
            print(f"{folder}: adapters of step {step} in fp32, {size / 1e6:,.1f} MB")
        return
    with _progress(f"exporting {run}") as report:
        done = export_run(run, folder, dtype, report)
    if as_json:
        print_json({"run": str(run), "folder": str(folder), "dtype": dtype, **asdict(done)})
        return
    shards = f"{done.shards} shard" + "s" * (done.shards > 1)
    print(f"{folder}: {done.model_type} of step {done.step} in {dtype}, {shards}, {done.bytes / 1e6:,.1f} MB")


@contextmanager
def _progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """A progress line on the terminal, in bytes."""
    from rich.text import Text

    from meshwright.cli.output import stderr_console

    with stderr_console().status(Text(text)) as status:  # no markup: a path may contain brackets
        yield lambda done, total: status.update(Text(f"{text}: {done / 1e9:.1f} of {total / 1e9:.1f} GB"))
