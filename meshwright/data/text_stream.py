"""Tokens as text while they are generated: each character when the last of its bytes is there."""

from collections.abc import Sequence

from meshwright.data.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
"""How a decoder writes bytes that are no character yet."""
_BEFORE = 8
"""So many tokens of the prompt decide how the first new one is written, with a space before it or without."""


class TextStream:
    """The text of tokens that arrive one by one; all parts together are what decoding all tokens at once gives."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), *, names: bool = True) -> None:
        """`before` are the tokens that the text follows; special tokens are written by name or not at all."""
        self._tokenizer, self._names = tokenizer, names
        self._tokens = list(before[-_BEFORE:])
        self._shown = len(self._tokens)
        self._known = 0

    def add(self, token: int) -> str:
        """The text that a token completes."""
        self._tokens.append(token)
        text = self._behind()
        return "" if text.endswith(_INCOMPLETE) else self._take(text)

    def end(self) -> str:
        """What is left: bytes that never became a character."""
        return self._take(self._behind())

    def _behind(self) -> str:
        # The tokens shown last are decoded again with the new ones, since neighbours decide about spaces; all tokens
        # each time would take the square of their number.
        before = self._decoded(self._tokens[self._known : self._shown])
        return self._decoded(self._tokens[self._known :])[len(before) :]

    def _take(self, text: str) -> str:
        if text:
            self._known, self._shown = self._shown, len(self._tokens)
        return text

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, names=self._names)
