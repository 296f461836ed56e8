"""`meshwright generate`: text from a trained run."""

from pathlib import Path

import typer

from meshwright.cli.amounts import token_option
from meshwright.cli.job import JSON

TOKENS = token_option(128, "--tokens", "Maximum number of tokens to generate.")
TEMPERATURE = typer.Option(0.8, "--temperature", min=0.0, help="0 always picks the most likely token.")
TOP_P = typer.Option(
    0.95, "--top-p", min=0.0, max=1.0, help="Sample from the most likely tokens up to this probability."
)
SEED = typer.Option(0, "--seed", min=0, help="Same seed, same text.")
IMAGE = typer.Option(
    [],
    "--image",
    metavar="FILE",
    help="A picture for a model that reads them, at <image> or before the text; repeatable.",
)
VIDEO = typer.Option([], "--video", metavar="FILE", help="A film for a model that reads them, at <video>; repeatable.")
AUDIO = typer.Option([], "--audio", metavar="FILE", help="A sound for a model that listens, at <audio>; repeatable.")
DEVICE = typer.Option("auto", "--device", help="auto, cpu, cuda or cuda:N.")


def generate(
    run: Path = typer.Argument(help="A run folder or a Hugging Face folder."),
    prompt: str = typer.Option("", "--prompt", help="Text to continue; names of special tokens are read as such."),
    image: list[Path] = IMAGE,
    video: list[Path] = VIDEO,
    audio: list[Path] = AUDIO,
    tokens: int = TOKENS,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    seed: int = SEED,
    device: str = DEVICE,
    as_json: bool = JSON,
) -> None:
    """Generate text with a run's newest weights, up to a stop token of the model."""
    from meshwright.cli.output import print_json, print_written
    from meshwright.data import Shown
    from meshwright.runs.generate import generate_from_run

    shown = Shown(image, video, audio)
    text, step = generate_from_run(run, prompt, tokens, temperature, top_p, seed, device, shown)
    if as_json:
        print_json({"run": str(run), "step": step, "prompt": prompt, "text": text})
    else:
        print_written(text)
