"""`meshwright checkpoint`: the weights a run left."""

import typer

from meshwright.cli import checkpoint_hf

app = typer.Typer(help="Move weights between runs and Hugging Face folders.", no_args_is_help=True)
app.command("import")(checkpoint_hf.import_)
app.command("export")(checkpoint_hf.export)
