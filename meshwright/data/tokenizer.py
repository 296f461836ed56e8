"""Text to tokens and back: a thin face over a byte-level BPE, trained here or given as a tokenizer.json."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from meshwright.data.files import read_text
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

    def __init__(self, inner: tokenizers.Tokenizer, end_of_text: int) -> None:
        self._inner = inner
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
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids if self._control.keys().isdisjoint(ids) else self._without_control(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, all processor cores at work."""
        _note_threads()
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            ids if self._control.keys().isdisjoint(ids := encoding.ids) else self._without_control(text)
            for text, encoding in zip(texts, found, strict=True)
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
        """The tokens of a text that holds names of control tokens: each name is parted, so that it is text too."""
        names = "|".join(re.escape(name) for name in sorted(self.control_names, key=len, reverse=True))
        cuts = [match.start() + 1 for match in re.finditer(names, text)]
        parts = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found = [encoding.ids for encoding in self._inner.encode_batch_fast(parts, add_special_tokens=False)]
        ids = [token for part in found for token in part]
        if not self._control.keys().isdisjoint(ids):
            name = next(self._control[token] for token in ids if token in self._control)
            raise UserError(
                f"the tokenizer makes its control token {name!r} out of the text {text[:80]!r}, which then cannot be "
                "distinguished from the token itself; use a tokenizer that does not"
            )
        return ids

    def encode_marked(self, texts: Sequence[str], marks: Sequence[Spans]) -> list[tuple[list[int], list[bool]]]:
        """The tokens of each text, names of special tokens taken as such, and whether each has a marked part."""
        reader = self._reader_of_names()
        _note_threads()
        found = reader.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, _within(encoding.offsets, spans)) for encoding, spans in zip(found, marks, strict=True)]

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of what a chat template wrote: names of special tokens are the tokens, and nothing is added."""
        ids: list[int] = self._reader_of_names().encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text to continue, as transformers encodes it: names of special tokens are the tokens, and the
        beginning that some tokenizers add is there once, even if the text has it."""
        ids = self.encode_rendered(text)
        whole: list[int] = self._reader_of_names().encode(text, add_special_tokens=True).ids
        return ids if ids[:1] == whole[:1] else whole

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
        text: str = self._inner.decode(list(tokens), skip_special_tokens=not names)
        return text

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
        text = read_text(path)
        inner = tokenizers.Tokenizer.from_str(text)
    except IsADirectoryError as error:
        raise UserError(f"{named} is a folder; name the tokenizer.json itself") from error
    except OSError as error:
        raise UserError(
            f"{named} cannot be read ({error.strerror}); correct the path, or leave it out to train one"
        ) from error
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"{named} is not a working tokenizer.json ({error}); save it again from where it came, "
            "or leave it out to train one"
        ) from error
    except BaseException as error:  # what its Rust code could not bear is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{named} is not a working tokenizer.json ({error}); save it again from where it came"
        ) from error
    _require_likely_tokens(inner, text, named)
    for name in END_OF_TEXT_NAMES:
        token = inner.token_to_id(name)
        if token is not None:
            return Tokenizer(inner, token)
    raise UserError(
        f"{named} has no end-of-text token (looked for {', '.join(END_OF_TEXT_NAMES)}); "
        "add one of these to its added_tokens"
    )


def _require_likely_tokens(inner: tokenizers.Tokenizer, text: str, named: str) -> None:
    """Refuse identifiers that no table could hold, and added tokens that the library silently gives other ones."""
    largest = max(inner.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= LARGEST_VOCABULARY:
        raise UserError(
            f"{named} has a token with the identifier {largest}, beyond the {LARGEST_VOCABULARY} a vocabulary may "
            "have; save it again from where it came"
        )
    for entry in json.loads(text).get("added_tokens") or []:
        if inner.token_to_id(entry["content"]) != entry["id"]:
            raise UserError(
                f"{named} lists the added token {entry['content']!r} with the identifier {entry['id']}, which its "
                f"vocabulary does not reach ({inner.token_to_id(entry['content'])} is next); save it again from where "
                "it came"
            )
