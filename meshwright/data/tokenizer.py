"""Text to tokens and back: a thin face over a byte-level BPE, trained here or given as a tokenizer.json."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from meshwright.data.files import read_text
from meshwright.data.tokenizer_limits import (
    Growth,
    Settings,
    bounded_call,
    checked_call,
    first_line,
    growth_of,
    is_failure,
    read_settings,
    require_bounded_text,
    require_bounded_vocabulary,
    total_bytes,
)
from meshwright.errors import UserError

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
Spans = Sequence[tuple[int, int]]
"""Parts of a text, from a character up to another."""
LARGEST_VOCABULARY = 1 << 24
"""Tables are made with a row for every entry, so a tokenizer that claims billions is refused."""
SMALLEST_VOCABULARY = 257
"""Every byte and the end of text."""

_CONTROL = re.compile(r"<\|.*\|>|<(?:s|bos|eos|pad|unk|mask|sep|cls)>|</s>", re.DOTALL)
"""Names that are for control alone, whatever a tokenizer's file says of them."""
_SLICE = 4096
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CUTTING_PASSES = 8

# The library's thread pool does not survive a fork: a child that used it would hang, and the library warns of every
# fork while this is not set. A user's own setting stands, except in a fork; and a process that inherits ours from the
# one that started it forks no more safely than that one.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))
_pool_started = False


def allow_threads(count: int) -> None:
    """Let a forked process use so many threads, unless the process it came from has used the library's."""
    safe = count > 1 and not _pool_started
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if safe else "false"
    os.environ["RAYON_NUM_THREADS"] = str(count)


def _note_threads() -> None:
    global _pool_started
    _pool_started = True


class Tokenizer:
    """Encodes documents (names of special tokens in them are text too) and prompts, and decodes tokens."""

    def __init__(self, inner: tokenizers.Tokenizer, end_of_text: int, growth: Growth | None = None) -> None:
        """`growth` is what untrusted normalizers may add to a text; a tokenizer trained here has none."""
        self._inner = inner
        self._growth = growth
        self._inner.no_truncation()
        self._inner.no_padding()
        # Otherwise a document that mentions <|endoftext|> would end there.
        self._inner.encode_special_tokens = True
        self._marked: tokenizers.Tokenizer | None = None
        self.end_of_text = end_of_text
        # Identifiers may have gaps, so the count of entries is not enough.
        self.vocab_size: int = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
        self._control = self._control_tokens()

    @property
    def control_names(self) -> list[str]:
        """The tokens that no text of a document may become, by name."""
        return list(self._control.values())

    def encode(self, text: str) -> list[int]:
        """The tokens of one text, without an end of text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, all processor cores at work."""
        self._require_bounded(texts)
        encode = self._inner.encode_batch_fast
        encodings = self._call(lambda: encode(list(texts), add_special_tokens=False), texts)
        return [
            ids if self._control.keys().isdisjoint(ids := encoding.ids) else self._without_control(text)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _control_tokens(self) -> dict[int, str]:
        """Special tokens, the end of text, and those whose name says it; not the one for what is unknown."""
        model = self._inner.model
        unknown = getattr(model, "unk_token", None)
        added = self._inner.get_added_tokens_decoder()
        found = {
            token: entry.content
            for token, entry in added.items()
            if (entry.special or _CONTROL.fullmatch(entry.content)) and entry.content != unknown
        }
        name = self._inner.id_to_token(self.end_of_text)
        return found | ({} if name is None else {self.end_of_text: name})

    def _without_control(self, text: str) -> list[int]:
        """The tokens of a text that holds names of control tokens, or what normalizers make such names of: each is
        parted, so that it is text too."""
        names = "|".join(re.escape(name) for name in sorted(self.control_names, key=len, reverse=True))
        cuts = [match.start() + 1 for match in re.finditer(names, text)]
        pieces = self._in_pieces(self._inner, text, cuts, lambda token, source: token in self._control)
        return [token for _, encoding in pieces for token in encoding.ids]

    def _in_pieces(
        self, reader: tokenizers.Tokenizer, text: str, cuts: Iterable[int], is_faked: Callable[[int, str], bool]
    ) -> list[tuple[int, tokenizers.Encoding]]:
        """A text encoded in pieces, with the first character of each: what becomes a token that `is_faked` says it
        may not, by the token and its text, is cut behind its first character."""
        bounds = sorted({0, len(text), *cuts})
        for _ in range(_CUTTING_PASSES):
            pieces = [text[start:stop] for start, stop in pairwise(bounds)]
            encode = partial(reader.encode_batch, pieces, add_special_tokens=False)
            encodings = list(zip(bounds, self._call(encode, [text]), strict=False))
            faked = [
                (token, start + first, start + stop)
                for start, encoding in encodings
                for token, (first, stop) in zip(encoding.ids, encoding.offsets, strict=True)
                if token in self._control and is_faked(token, text[start + first : start + stop])
            ]
            if not faked:
                return encodings
            # Of what comes from one character, it is the text next to it that a cut can take away.
            cuts = {cut for _, start, stop in faked for cut in ([start + 1] if stop - start > 1 else [start, stop])}
            if cuts.issubset(bounds):
                break
            bounds = sorted(cuts.union(bounds))
        name = self._control[faked[0][0]]
        raise UserError(
            f"the tokenizer makes its control token {name!r} out of the text {text[:80]!r}, which then cannot be "
            "distinguished from the token itself; use a tokenizer that does not"
        )

    def encode_marked(self, texts: Sequence[str], marks: Sequence[Spans]) -> list[tuple[list[int], list[bool]]]:
        """The tokens of each text, names of special tokens taken as such, and whether each has a marked part."""
        return [
            (ids, _within(offsets, spans))
            for (ids, offsets), spans in zip(self._encode_named(texts), marks, strict=True)
        ]

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of what a chat template wrote: names of special tokens are the tokens, and nothing is added."""
        return self._encode_named([text])[0][0]

    def _encode_named(self, texts: Sequence[str]) -> list[tuple[list[int], Spans]]:
        """The tokens of each text and their characters, where control tokens come from nothing but their names: no
        message holds those, and what normalizers make of `<|IM_END|>` is not the end of one."""
        self._require_bounded(texts)
        reader = self._reader_of_names()
        encodings = self._call(lambda: reader.encode_batch(list(texts), add_special_tokens=False), texts)
        named = list[tuple[list[int], Spans]]()
        for text, encoding in zip(texts, encodings, strict=True):
            ids, offsets = encoding.ids, encoding.offsets
            if any(
                token in self._control and self._is_not_its_name(token, text[start:stop])
                for token, (start, stop) in zip(ids, offsets, strict=True)
            ):
                pieces = self._in_pieces(reader, text, (), self._is_not_its_name)
                ids = [token for _, piece in pieces for token in piece.ids]
                offsets = [(first + start, first + stop) for first, piece in pieces for start, stop in piece.offsets]
            named.append((ids, offsets))
        return named

    def _is_not_its_name(self, token: int, source: str) -> bool:
        # Some special tokens take the white space around them.
        return source.strip() != self._control[token].strip()

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text to continue, as transformers encodes it: names of special tokens are the tokens, and the
        beginning that some tokenizers add is there once, even if the text has it."""
        ids = self.encode_rendered(text)
        reader = self._reader_of_names()
        encode = partial(reader.encode_batch, [text], add_special_tokens=True)
        with_beginning: list[int] = self._call(encode, [text])[0].ids
        return ids if ids[:1] == with_beginning[:1] else with_beginning

    def _call(self, encode: Callable[[], list[tokenizers.Encoding]], texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """The encodings of texts, with a time limit where the tokenizer is not trusted."""
        _note_threads()
        sample = texts[0] if texts else ""
        if self._growth is None:
            return checked_call(encode, sample)
        return bounded_call(encode, total_bytes(texts), sample)

    def _require_bounded(self, texts: Sequence[str]) -> None:
        if self._growth is not None:
            _note_threads()
            for text in texts:
                require_bounded_text(self._inner, self._growth, text)

    def token_named(self, name: str) -> int | None:
        """The token with a name; None where there is none."""
        token: int | None = self._inner.token_to_id(name)
        return token

    def first_control(self, text: str) -> int | None:
        """The first control token that a text names."""
        return next((token for token in self.encode_rendered(text) if token in self._control), None)

    def _reader_of_names(self) -> tokenizers.Tokenizer:
        if self._marked is None:
            self._marked = tokenizers.Tokenizer.from_str(self._inner.to_str())
            self._marked.encode_special_tokens = False
        return self._marked

    def decode(self, tokens: Sequence[int], *, names: bool = True) -> str:
        """The text of the tokens, special ones by name or not at all."""
        if self._growth is None or not self._growth.decoder_searches:
            return str(checked_call(lambda: self._inner.decode(list(tokens), skip_special_tokens=not names), "tokens"))
        # In a batch of one, since the library keeps Python's lock for a text alone.
        _note_threads()
        decode = partial(self._inner.decode_batch, [list(tokens)], skip_special_tokens=not names)
        return str(bounded_call(decode, len(tokens), "tokens")[0])

    def byte_lengths(self) -> NDArray[np.int64]:
        """How many bytes of text every token stands for; special tokens stand for none."""
        lengths = np.zeros(self.vocab_size, np.int64)
        special = {token for token, entry in self._inner.get_added_tokens_decoder().items() if entry.special}
        special |= self._control.keys()
        # A byte-level alphabet has one character for each byte.
        by_byte = type(self._inner.decoder).__name__ == "ByteLevel"
        for text, token in self._inner.get_vocab(with_added_tokens=True).items():
            if token in special:
                continue
            if by_byte:
                lengths[token] = len(text)
            elif _BYTE.fullmatch(text):
                lengths[token] = 1
            else:
                lengths[token] = len(text.replace("▁", " ").encode("utf-8"))
        return lengths

    def save(self, path: Path) -> None:
        """Write the tokenizer.json."""
        path.write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """The text of the tokenizer.json."""
        text: str = self._inner.to_str(pretty=True)
        return text

    def fingerprint(self) -> str:
        """A hash by which equal tokenizers are recognised."""
        return hashlib.sha256(self._inner.to_str().encode()).hexdigest()


def _within(offsets: Spans, spans: Spans) -> list[bool]:
    """Whether each token, given by its first character and the one behind it, has a part in one of the spans.

    Where a template's last space and the first word after it are one token, it is the word's, as transformers has it.
    """
    firsts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    inside = np.zeros(len(offsets), np.bool_)
    for start, stop in spans:
        inside |= (firsts < stop) & ((start <= firsts) | (start < ends))
    found: list[bool] = inside.tolist()
    return found


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of at most vocab_size entries from texts; the same texts give the same bytes."""
    require_trainable(vocab_size)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT_NAMES[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Training takes the square of a word's length, and text without spaces is one word; a cut every few pages
    # bounds it and changes next to nothing else.
    slices = (text[start : start + _SLICE] for text in texts for start in range(0, len(text), _SLICE))
    _note_threads()
    inner.train_from_iterator(slices, trainer)
    return Tokenizer(inner, inner.get_vocab()[END_OF_TEXT_NAMES[0]])


def require_trainable(vocab_size: int, named: str = "model.vocab_size =") -> None:
    """Refuse a vocabulary too small to train a tokenizer for."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"{named} {vocab_size} is too small for a byte-level tokenizer; choose at least {SMALLEST_VOCABULARY}, or "
            "give a tokenizer of your own"
        )


def load_tokenizer(path: Path, named: str | None = None) -> Tokenizer:
    """Read a tokenizer.json and find its end of text; errors speak of data.tokenizer unless it was named otherwise."""
    named = named or f"data.tokenizer = {path}"
    try:
        settings = read_settings(text := read_text(path))
        growth = growth_of(settings)
        inner = tokenizers.Tokenizer.from_str(text)
        require_bounded_vocabulary(inner)
    except IsADirectoryError as error:
        raise UserError(f"{named} is a folder; name the tokenizer.json itself") from error
    except OSError as error:
        raise UserError(
            f"{named} cannot be read ({error.strerror}); correct the path, or leave it out to train one"
        ) from error
    except BaseException as error:
        if not is_failure(error):
            raise
        raise UserError(
            f"{named} is not a working tokenizer.json ({first_line(error)}); save it again from where it came, "
            "or leave it out to train one"
        ) from error
    _require_likely_tokens(inner, settings, named)
    for name in END_OF_TEXT_NAMES:
        token = inner.token_to_id(name)
        if token is not None:
            return Tokenizer(inner, token, growth)
    raise UserError(
        f"{named} has no end-of-text token (looked for {', '.join(END_OF_TEXT_NAMES)}); "
        "add one of these to its added_tokens"
    )


def _require_likely_tokens(inner: tokenizers.Tokenizer, settings: Settings, named: str) -> None:
    """Refuse identifiers that no table could hold, and added tokens that the library silently gives other ones."""
    largest = max(inner.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= LARGEST_VOCABULARY:
        raise UserError(
            f"{named} has a token with the identifier {largest}, beyond the {LARGEST_VOCABULARY} a vocabulary may "
            "have; save it again from where it came"
        )
    for entry in settings.get("added_tokens") or []:
        if inner.token_to_id(entry["content"]) != entry["id"]:
            raise UserError(
                f"{named} lists the added token {entry['content']!r} with the identifier {entry['id']}, which its "
                f"vocabulary does not reach ({inner.token_to_id(entry['content'])} is next); save it again from where "
                "it came"
            )
