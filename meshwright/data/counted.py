"""Text by what counts in the loss: of a conversation only what the assistant says."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from meshwright.data.corpus import Corpus
from meshwright.data.store import TokenStore
from meshwright.data.text_stream import TextStream
from meshwright.data.tokenizer import Tokenizer

_LOOK_TOKENS = 1 << 16
"""Where the first documents are looked for."""


class TextPart(NamedTuple):
    """Neighbouring tokens as text; all of them count in the loss, or none does."""

    text: str
    counts: bool


@dataclass(frozen=True)
class CountedText:
    """A document as text, its first tokens at least."""

    tokens: int
    loss_tokens: int
    """Those of the whole document that count in the loss."""
    parts: list[TextPart]


def counted_text(store: TokenStore, tokenizer: Tokenizer, start: int, stop: int, most: int) -> CountedText:
    """The document between two places, of which at most so many tokens are decoded; its end of text is left out."""
    targets = store.targets(start, stop)
    tokens = store.read(start, min(stop, start + most)).tolist()
    flags = [True] * len(tokens) if targets is None else targets[: len(tokens)].tolist()
    if tokens and tokens[-1] == tokenizer.end_of_text:
        tokens.pop()
    loss_tokens = stop - start if targets is None else int(targets.sum())
    return CountedText(stop - start, loss_tokens, _parts(tokenizer, zip(tokens, flags, strict=False)))


def first_conversations(corpus: Corpus, count: int, most: int) -> list[CountedText]:
    """The first conversations of a corpus; none where every token counts."""
    store = corpus.train
    if corpus.tokenizer is None or corpus.flow is not None or store.targets(0, 0) is None:
        return []
    ahead = min(len(store), _LOOK_TOKENS)
    bounds = [*store.starts_between(0, ahead).tolist()[: count + 1], ahead][: count + 1]
    return [counted_text(store, corpus.tokenizer, start, stop, most) for start, stop in pairwise(bounds)]


def _parts(tokenizer: Tokenizer, tokens: Iterable[tuple[int, bool]]) -> list[TextPart]:
    found: list[TextPart] = []

    def add(text: str, counts: bool) -> None:
        if found and found[-1].counts == counts:
            found[-1] = TextPart(found[-1].text + text, counts)
        elif text:
            found.append(TextPart(text, counts))

    stream, counts = TextStream(tokenizer), True
    for token, counts in tokens:
        add(stream.add(token), counts)
    add(stream.end(), counts)
    return found
