"""Generate text from a run or a Hugging Face folder: its newest weights, its tokenizer, its stop tokens."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.data import shown_media
from meshwright.data.text_stream import TextStream
from meshwright.runs.writer import open_writer
from meshwright.train import generate


def generate_from_run(
    run: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: str,
    images: Sequence[Path] = (),
) -> tuple[str, int | None]:
    """The prompt and its continuation by a run's newest weights or a folder's, and the step of those weights.

    Images take the places of `<image>` in the prompt, or come before it.
    """
    writer = open_writer(run, device)
    tokenizer, viewer = writer.tokenizer, writer.viewer(images)
    if viewer is None:
        start, media = tokenizer.encode_prompt(prompt), None
    else:
        asked = viewer.named(prompt, len(images))
        first, rest = tokenizer.encode_prompt, tokenizer.encode_rendered
        start, places = viewer.encode(tokenizer, asked, len(images), first, rest)
        media = shown_media(viewer.look(images), places) if images else None
    start = start or [tokenizer.end_of_text]
    written = generate(
        writer.model,
        start,
        tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=writer.generation.stop,
        vocab_size=tokenizer.vocab_size,
        repetition_penalty=writer.generation.repetition_penalty,
        media=media,
    )
    text = TextStream(tokenizer, start if prompt else ())
    return prompt + "".join([*map(text.add, written), text.end()]), writer.step
