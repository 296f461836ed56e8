"""Generate text from a model: one token at a time, with a key-value cache."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.model import Decoder, KVCache, Media
from meshwright.torch_private.compiler import eagerly


def generate(
    model: Decoder, prompt: list[int], tokens: int, *, stop: Collection[int] = (), **options: Any
) -> list[int]:
    """Up to `tokens` new token ids after the prompt and before a stop token; the options are those of `stream`."""
    written = list(stream(model, prompt, tokens, stop=stop, **options))
    return written[:-1] if written and written[-1] in stop else written


@torch.no_grad()
def stream(
    model: Decoder,
    prompt: list[int],
    tokens: int,
    *,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    stop: Collection[int] = (),
    vocab_size: int | None = None,
    repetition_penalty: float = 1.0,
    cache: KVCache | None = None,
    media: Media | None = None,
) -> Iterator[int]:
    """Up to `tokens` new token ids after the prompt, each when it is chosen; a stop token is the last one.

    Temperature 0 always picks the most likely. Ids from `vocab_size` on (embedding rows the tokenizer never uses) are
    not sampled. Sampling happens on the CPU with its own generator, so a seed gives the same text on every device that
    computes the same probabilities. A cache may hold the beginning of the prompt, which is then not computed again.
    Media are what the prompt's placeholders stand for, with their places in it.
    """
    _require_room(model, prompt, tokens)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache() if cache is None else cache
    seen = list(prompt)
    for _ in range(tokens):
        fresh = torch.tensor([seen[cache.length :]], device=device)
        shown = {} if media is None else _fresh_media(media, cache.length, device)
        with eagerly():  # every length of the cache, and every layer of it, would be compiled anew
            logits_V = model(fresh, cache=cache, **shown)[0, -1].float().cpu()[:vocab_size]
        token = _draw(_penalised(logits_V, seen, repetition_penalty), temperature, top_p, generator)
        seen.append(token)
        yield token
        if token in stop:
            return


def _fresh_media(media: Media, known: int, device: torch.device) -> dict[str, Media]:
    """The items with tokens that the cache does not hold yet, by their places among the fresh tokens."""
    places_BKT = torch.where(media.places_BKT < known, -1, media.places_BKT - known)
    due_K = (places_BKT >= 0).any(-1)[0]
    if not due_K.any():
        return {}
    return {"media": Media(media.items_BK[:, due_K].to(device), places_BKT[:, due_K].to(device))}


def _require_room(model: Decoder, prompt: list[int], tokens: int) -> None:
    limit, vocab_size = model.shape.max_sequence_length, model.shape.vocab_size
    if len(prompt) + tokens > limit:
        raise UserError(
            f"prompt of {len(prompt)} tokens and --tokens {tokens} exceed model.max_sequence_length = {limit}; "
            f"ask for at most {max(0, limit - len(prompt))} tokens"
        )
    if max(prompt) >= vocab_size:
        raise UserError(
            f"the prompt has the token {max(prompt)}, but model.vocab_size = {vocab_size}: the tokenizer is of another "
            "model; use the one the weights were trained with"
        )


def _penalised(logits_V: Tensor, seen: list[int], penalty: float) -> Tensor:
    """Logits of tokens that were there already, made smaller (arXiv:1909.05858, section 4.1)."""
    if penalty == 1.0:
        return logits_V
    index = torch.tensor(sorted(set(seen)))
    before = logits_V[index]
    return logits_V.index_put((index,), torch.where(before < 0, before * penalty, before / penalty))


def _draw(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if not logits_V.isfinite().all():
        raise UserError("the model's logits are not finite because its weights diverged in training; use another run")
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, order_V = torch.softmax(logits_V / temperature, dim=-1).sort(descending=True)
    before_V = probabilities_V.cumsum(0) - probabilities_V
    probabilities_V[1:][before_V[1:] >= top_p] = 0.0  # the most likely one always stays
    return int(order_V[torch.multinomial(probabilities_V, 1, generator=generator)])
