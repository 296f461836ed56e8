"""`meshwright generate`: text from a trained run."""

from pathlib import Path

import typer

from meshwright.cli.job import JSON


def generate(
    run: Path = typer.Argument(help="A run folder."),
    prompt: str = typer.Option("", "--prompt", help="Text to continue."),
    tokens: int = typer.Option(128, "--tokens", min=1, help="Most tokens to write."),
    temperature: float = typer.Option(0.8, "--temperature", min=0.0, help="0 always takes the likeliest token."),
    top_p: float = typer.Option(
        0.95, "--top-p", min=0.0, max=1.0, help="Draw from the likeliest tokens of this share."
    ),
    seed: int = typer.Option(0, "--seed", min=0, help="Same seed, same text."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = JSON,
) -> None:
    """Write text with the newest weights of a run."""
    from meshwright.cli.output import print_json
    from meshwright.runs.generate import generate_from_run

    text, step = generate_from_run(run, prompt, tokens, temperature, top_p, seed, device)
    if as_json:
        print_json({"run": str(run), "step": step, "prompt": prompt, "text": text})
    else:
        print(text)
