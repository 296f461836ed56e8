"""`meshwright job`: explain job files, and convert other programs' settings to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from meshwright.job import Converted

app = typer.Typer(help="Explain a job file, print its schema, or convert other settings to one.", no_args_is_help=True)

JOB = typer.Argument(help="A job file, or a recipe's name such as demo.")
SET = typer.Option([], "--set", metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated.")
TRUST = typer.Option(False, "--trust", help="Run the code that a run folder names (model.file); read it first.")
JSON = typer.Option(False, "--json", help="Print JSON.")
RANKS = typer.Option(None, "--ranks", min=1, help="Data-parallel ranks; by default what the batch sizes imply, or 1.")
FORCE = typer.Option(False, "--force", help="Overwrite an existing file.")
OUT = typer.Option(None, "--out", metavar="JOB.toml", help="Write the job here instead of printing it.")


@app.command()
def explain(
    job: str = JOB,
    overrides: list[str] = SET,
    changed: bool = typer.Option(False, "--changed", help="Only fields that differ from the defaults."),
    as_json: bool = JSON,
) -> None:
    """Print every field of a job: value, where it came from, what it means."""
    from meshwright.cli.explain import show_explained

    show_explained(job, overrides, changed, as_json)


@app.command()
def schema() -> None:
    """Print the JSON schema of a job file, for completion and checking in editors."""
    from meshwright.cli.output import print_json
    from meshwright.job import job_schema

    print_json(job_schema())


@app.command("from-deepspeed")
def from_deepspeed(
    config: Path = typer.Argument(help="A ds_config.json."),
    ranks: int | None = RANKS,
    out: Path | None = OUT,
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Convert a DeepSpeed configuration to a job; settings without a counterpart are rejected by name."""
    from meshwright.job import job_from_deepspeed

    _converted(job_from_deepspeed(config, ranks), f"from {config.name}, a DeepSpeed configuration", out, force, as_json)


@app.command("from-hf-trainer")
def from_hf_trainer(
    arguments: Path = typer.Argument(help="TrainingArguments or SFTConfig as JSON (to_json_string), or the command."),
    deepspeed: Path | None = typer.Option(
        None, "--deepspeed", metavar="DS.json", help="The DeepSpeed configuration; by default what the arguments name."
    ),
    examples: int | None = typer.Option(
        None, "--examples", min=1, help="Training examples, to count epochs in steps; the Trainer logs Num examples."
    ),
    ranks: int | None = RANKS,
    out: Path | None = OUT,
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Convert Hugging Face Trainer arguments to a job; settings without a counterpart are rejected by name."""
    from meshwright.job import job_from_hf_trainer

    converted = job_from_hf_trainer(arguments, ranks, deepspeed=deepspeed, examples=examples)
    files = arguments.name if deepspeed is None else f"{arguments.name} and {deepspeed.name}"
    _converted(converted, f"from {files}, TrainingArguments", out, force, as_json)


@app.command("from-torchtitan")
def from_torchtitan(
    config: Path = typer.Argument(help="A job configuration of torchtitan 0.2, in TOML."),
    gpus: int | None = typer.Option(None, "--gpus", min=1, help="GPUs in all, if the file leaves them to the start."),
    out: Path | None = OUT,
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Convert a torchtitan configuration to a job; settings without a counterpart are rejected by name."""
    from meshwright.job import job_from_torchtitan

    _converted(job_from_torchtitan(config, gpus), f"from {config.name}, torchtitan", out, force, as_json)


@app.command("from-megatron")
def from_megatron(
    script: Path = typer.Argument(help="A script that starts Megatron-LM, or a file with its arguments."),
    gpus: int | None = typer.Option(None, "--gpus", min=1, help="GPUs in all; by default what the script starts."),
    out: Path | None = OUT,
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Convert Megatron-LM's arguments to a job; the script is read and never run. Unmatched ones are rejected."""
    from meshwright.job import job_from_megatron

    _converted(job_from_megatron(script, gpus), f"from {script.name}, Megatron-LM's arguments", out, force, as_json)


def _converted(converted: Converted, heading: str, out: Path | None, force: bool, as_json: bool) -> None:
    from meshwright.cli.output import print_json, require_new, write_file
    from meshwright.job import job_text

    require_new(out, "--out", force)
    text = job_text(converted.job, "\n".join([heading, *(f"note: {note}" for note in converted.notes)]))
    if out is not None:
        write_file(out, text, "--out")
    if as_json:
        written = None if out is None else str(out)
        print_json({"fields": converted.fields, "notes": converted.notes, "job": text, "written": written})
    elif out is None:
        print(text, end="")
    else:
        print(f"{out}: {len(converted.fields)} fields, {len(converted.notes)} notes at its top")
