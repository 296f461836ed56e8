"""Generate text from a model: one token at a time, with a key-value cache."""

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.model import Decoder, KVCache


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    tokens: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    stop: int | None = None,
    vocab_size: int | None = None,
) -> list[int]:
    """Up to `tokens` new token ids after the prompt; temperature 0 always picks the most likely.

    Ids from `vocab_size` on (embedding rows the tokenizer never uses) are not sampled. Sampling happens on the CPU with
    its own generator, so a seed gives the same text on every device that computes the same probabilities.
    """
    limit = model.shape.max_sequence_length
    if len(prompt) + tokens > limit:
        raise UserError(
            f"prompt of {len(prompt)} tokens and --tokens {tokens} exceed model.max_sequence_length = {limit}; "
            f"ask for at most {max(0, limit - len(prompt))} tokens"
        )
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache()
    fresh = torch.tensor([prompt], device=device)
    written: list[int] = []
    while len(written) < tokens:
        logits_V = model(fresh, cache=cache)[0, -1].float().cpu()[:vocab_size]
        token = _draw(logits_V, temperature, top_p, generator)
        if token == stop:
            break
        written.append(token)
        fresh = torch.tensor([[token]], device=device)
    return written


def _draw(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if not logits_V.isfinite().all():
        raise UserError("the model's logits are not finite because its weights diverged in training; use another run")
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, order_V = torch.softmax(logits_V / temperature, dim=-1).sort(descending=True)
    before_V = probabilities_V.cumsum(0) - probabilities_V
    probabilities_V[1:][before_V[1:] >= top_p] = 0.0  # the most likely one always stays
    return int(order_V[torch.multinomial(probabilities_V, 1, generator=generator)])
