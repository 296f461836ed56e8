"""Samples as tokens: their text between placeholders, and so many placeholder tokens for each item."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.data.raw import MediaTaking, Text
from meshwright.data.raw.media import text_parts
from meshwright.data.tokenizer import Spans, Tokenizer
from meshwright.errors import UserError


@dataclass(frozen=True)
class Encoded:
    """A sample's tokens, which of them count in the loss, and where its pictures, film and sound begin."""

    tokens: list[int]
    targets: list[bool]
    places: list[int]


def encode_samples(tokenizer: Tokenizer, batch: Sequence[Text], taking: MediaTaking) -> list[Encoded]:
    """The tokens of samples, the end of text behind each; no placeholder counts in the loss."""
    placeholders = [placeholder_of(tokenizer, name, own.placeholder) for name, own in taking.media]
    sizes = [own.tokens or 0 for _, own in taking.media]
    parts = [(part, _shifted(text.marks or (), begin)) for text in batch for part, begin in text_parts(text.text)]
    encoded = iter(_encoded(tokenizer, parts, names=taking.chat is not None))
    found = []
    for text in batch:
        tokens, targets, places = list[int](), list[bool](), list[int]()
        for number in range(len(text.media) + 1):
            if number:
                medium = text.media[number - 1]
                places.append(len(tokens))
                length = sizes[medium.field] * medium.items
                tokens += [placeholders[medium.field]] * length
                targets += [False] * length
            more, counted = next(encoded)
            tokens += more
            targets += counted
        if not more or more[-1] != tokenizer.end_of_text:
            tokens.append(tokenizer.end_of_text)
            targets.append(text.marks is not None and any(stop > len(text.text) for _, stop in text.marks))
        found.append(Encoded(tokens, targets, places))
    return found


def _encoded(tokenizer: Tokenizer, parts: list[tuple[str, Spans]], names: bool) -> list[tuple[list[int], list[bool]]]:
    texts = [text for text, _ in parts]
    if names:  # what a chat template wrote
        return tokenizer.encode_marked(texts, [spans for _, spans in parts])
    return [(tokens, [True] * len(tokens)) for tokens in tokenizer.encode_batch(texts)]


def placeholder_of(tokenizer: Tokenizer, name: str, given: int | None) -> int:
    """The token in the places of a field's items: the one it declares, the tokenizer's `<name>`, or the end of text."""
    if given is None:
        named = tokenizer.token_named(f"<{name}>")
        return tokenizer.end_of_text if named is None else named
    if given >= tokenizer.vocab_size:
        raise UserError(
            f"data.fields.{name}.placeholder = {given} is beyond the {tokenizer.vocab_size} tokens of the tokenizer; "
            "choose one of them, or leave it out"
        )
    return given


def _shifted(spans: Spans, by: int) -> Spans:
    return [(start - by, stop - by) for start, stop in spans]
