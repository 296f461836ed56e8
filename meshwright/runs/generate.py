"""Generate text from a run or a Hugging Face folder: its newest weights, its tokenizer, its stop tokens."""

from pathlib import Path

from meshwright.data import NOTHING, Shown
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
    shown: Shown = NOTHING,
) -> tuple[str, int | None]:
    """The prompt and its continuation by a run's newest weights or a folder's, and the step of those weights.

    What is shown takes the places of `<image>`, `<video>` and `<audio>` in the prompt, or comes before it.
    """
    writer = open_writer(run, device)
    tokenizer, viewer = writer.tokenizer, writer.viewer(shown)
    seen = viewer.look(shown)
    first, rest = tokenizer.encode_prompt, tokenizer.encode_rendered
    start, media = viewer.encode(tokenizer, viewer.named(prompt, shown), seen, first, rest)
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
