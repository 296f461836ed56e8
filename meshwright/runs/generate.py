"""Generate text from a run folder: its job, its newest weights, its tokenizer."""

from pathlib import Path

import torch

from meshwright.checkpoint import load_weights, newest_weights
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError
from meshwright.model import Decoder
from meshwright.runs.folder import RunFolder
from meshwright.train import choose_device, generate


def generate_from_run(
    run: Path, prompt: str, tokens: int, temperature: float, top_p: float, seed: int, device: str
) -> tuple[str, int]:
    """The prompt and its continuation by a run's newest weights, and the step of those weights."""
    saved = RunFolder.open(run).resolved_job(trust=True)  # none of its code is run
    job = saved.model_copy(update={"run": saved.run.model_copy(update={"device": device})})
    if job.model.file is not None:
        raise UserError(f"{run} trained model.file = {job.model.file}, which cannot generate text; use a preset")
    target = choose_device(job)
    checkpoint = newest_weights(run)
    if not (run / "tokenizer.json").is_file():
        raise UserError(f"{run} has no tokenizer.json (its tokens are synthetic or came without one); use another run")
    tokenizer = load_tokenizer(run / "tokenizer.json")
    with torch.device("meta"):
        model = Decoder(job.model)
    model.to_empty(device=target)
    step = load_weights(checkpoint, model)
    start = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    written = generate(
        model,
        start,
        tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tokenizer.end_of_text,
        vocab_size=tokenizer.vocab_size,
    )
    return prompt + tokenizer.decode(written), step
