"""Bounds on what an untrusted tokenizer.json may take: memory for its tables and for the texts it makes longer; time.

The library bounds nothing: a few `Replace` steps make gigabytes of ten characters, a regular expression may search for
hours, and what its Rust code cannot bear is a panic, which is no `Exception`. Three bounds answer that:

- sizes of tables and of the steps' settings, before the library reads them (`read_settings`),
- how much longer the steps could make a text at worst (`growth_of`), and whether they do so with a long one
  (`require_bounded_text`),
- a time limit on every call (`bounded_call`), which also turns whatever is raised into a sentence.
"""

import base64
import binascii
import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import tokenizers

from meshwright.errors import UserError

Settings = dict[str, Any]
Result = TypeVar("Result")

LONGEST_TOKEN = 4096
"""Characters. A text of a thousand tokens is then within megabytes; published vocabularies have a few hundred."""
PIECES_BYTES = 6 << 20
"""A Unigram model takes about 350 bytes of memory for every byte of its pieces; 250,000 pieces are about 3 MB."""
ADDED_BYTES = 1 << 20
"""Reading added tokens takes more than proportional time."""
STEPS_BYTES = 256 << 10
"""Of JSON for all steps around the model, tables of characters not counted: a class in a regular expression takes up to
10 KB of memory."""

LARGEST_GROWTH = 256
"""XLM-RoBERTa's normalizers could at worst make a text 66 times as long, T5's 132 times."""
LARGEST_GROWTH_IN_CONTEXT = 16
"""Of steps that depend on more than the characters nearby, so that measuring slices of a text may miss them."""
LARGEST_PRE_TOKENIZER_GROWTH = 16
LARGEST_DECODER_GROWTH = 16
NORMALIZED_BYTES = 4 << 20
NORMALIZED_RATIO = 3
"""A longer normalised text is refused where it is also more than so many times as long as the text: at a token a byte,
encoding takes up to 350 bytes of memory for each, and what people write grows by a factor of 3 at most."""

CALL_S = 60.0
CALL_BYTES_PER_S = 50_000
"""A slow tokenizer on one core encodes ten times as many."""

# The most that a step may multiply the bytes of UTF-8 by: https://www.unicode.org/reports/tr15/#Design_Goals.
_UNICODE_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "BertNormalizer": 8, "ByteLevel": 2}
_SHRINKING = ("Strip", "StripAccents", "Nmt")
_UNKNOWN_GROWTH = 11
_NO_MODEL = {"type": "WordLevel", "vocab": {}, "unk_token": "?"}


class Growth(NamedTuple):
    """How many times as long normalizers may make a text at worst."""

    factor: float
    factor_in_context: float
    """The part of it that comes from steps which may depend on far away characters."""
    normalizers_search: bool
    """Whether they use a regular expression, which may take long."""
    decoder_searches: bool
    """Whether tokens become text by a regular expression."""


def read_settings(text: str) -> Settings:
    """The settings in a tokenizer.json; a `ValueError` says what no library should be made to read."""
    try:
        settings = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(settings, dict):
        raise ValueError("it is no JSON object")
    model = settings.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(pieces, list):
        _require_at_most(_bytes_of_texts(pieces), PIECES_BYTES, "its vocabulary's pieces take")
    _require_at_most(_bytes_of_texts(settings.get("added_tokens")), ADDED_BYTES, "its added tokens take")
    around = {name: value for name, value in settings.items() if name not in ("model", "added_tokens")}
    tables = sum(len(step["precompiled_charsmap"]) for step in _dictionaries(around) if _charsmap(step) is not None)
    _require_at_most(len(json.dumps(around)) - tables, STEPS_BYTES, "its normalizers, pre-tokenizers and decoders take")
    return settings


def growth_of(settings: Settings) -> Growth:
    """How much longer a tokenizer's normalizers may make a text; a `ValueError` where its steps may go too far.

    Asked before the library reads the file, as it then normalises the names of added tokens. The steps are as the
    library itself understands them, in a tokenizer without tokens.
    """
    inner = tokenizers.Tokenizer.from_str(json.dumps({**settings, "model": _NO_MODEL, "added_tokens": []}))
    pre_tokenizers, decoders = _steps(inner.pre_tokenizer), _steps(inner.decoder)
    _require_growth(prod(map(_pre_tokenizer_growth, pre_tokenizers)), LARGEST_PRE_TOKENIZER_GROWTH, "pre-tokenizers")
    _require_growth(prod(map(_decoder_growth, decoders)), LARGEST_DECODER_GROWTH, "decoders")
    normalizers = _steps(inner.normalizer)
    growth = Growth(
        prod(map(_normalizer_growth, normalizers)),
        prod(_normalizer_growth(step) for step in normalizers if _depends_on_context(step)),
        any(map(_searches, normalizers)),
        any(map(_searches, decoders)),
    )
    _require_growth(growth.factor, LARGEST_GROWTH, "normalizers")
    _require_growth(growth.factor_in_context, LARGEST_GROWTH_IN_CONTEXT, "Prepend and regular Replace normalizers")
    added_bytes = int(growth.factor * _bytes_of_texts(settings.get("added_tokens")))
    _require_at_most(added_bytes, NORMALIZED_BYTES, "its added tokens, normalised, may take")
    return growth


def require_bounded_vocabulary(inner: tokenizers.Tokenizer) -> None:
    """Refuse tokens whose text is no token's, and a template around texts that goes beyond them; a `ValueError`."""
    vocabulary = inner.get_vocab(with_added_tokens=True)
    _require_short_tokens(vocabulary)
    _require_one_sequence(inner, max(vocabulary.values(), default=0))


def require_bounded_text(inner: tokenizers.Tokenizer, growth: Growth, text: str) -> None:
    """Refuse a text that the normalizers make so long that encoding it could take all memory."""
    if 4 * len(text) * growth.factor <= NORMALIZED_BYTES:
        return
    size_bytes = len(text.encode("utf-8", "replace"))
    if inner.normalizer is None or size_bytes * growth.factor <= NORMALIZED_BYTES:
        return
    # In slices, each of which is harmless: their sum is the length, but for what happens at the cuts.
    slice_characters = int(NORMALIZED_BYTES / growth.factor / 4)
    limit, normalized_bytes = max(NORMALIZED_BYTES, NORMALIZED_RATIO * size_bytes), 0
    for start in range(0, len(text), slice_characters):
        part = text[start : start + slice_characters]
        if growth.normalizers_search:
            # Normalising keeps Python's lock, so no thread could watch it; what encodes in time is normalised in time.
            bounded_call(partial(inner.encode_batch_fast, [part], add_special_tokens=False), 4 * len(part), part)
        normalized = checked_call(partial(inner.normalizer.normalize_str, part), part)
        normalized_bytes += len(normalized.encode("utf-8", "replace"))
        if normalized_bytes > limit:
            raise UserError(
                f"the tokenizer's normalizers make more than {limit >> 20} MiB of the {size_bytes >> 10} KiB of text "
                f"that begin with {text[:40]!r}; use a tokenizer that does not"
            )


def bounded_call(call: Callable[[], Result], size_bytes: int, sample: str) -> Result:
    """The result of a call of the library, which must release Python's lock meanwhile; `UserError` where it fails, or
    where it takes too long on a clock and of processors alike. `sample` is text for the sentence."""
    results, errors = list[Result](), list[BaseException]()

    def fetch() -> None:
        try:
            results.append(checked_call(call, sample))
        except BaseException as error:
            errors.append(error)

    # A daemon: a thread that never ends must not hold up the end of the process that reports it.
    thread = threading.Thread(target=fetch, daemon=True)
    limit_s = CALL_S + size_bytes / CALL_BYTES_PER_S
    began, processors_began = time.monotonic(), time.process_time()
    thread.start()
    while thread.is_alive():
        thread.join(min(1.0, limit_s))
        # A machine that was busy or asleep is no fault of the tokenizer's.
        seconds = min(time.monotonic() - began, time.process_time() - processors_began)
        if thread.is_alive() and seconds > limit_s:
            raise UserError(
                f"the tokenizer takes more than {limit_s:.0f} s for {sample[:40]!r} and what follows it; its regular "
                "expressions or its model are made to take forever, so use another tokenizer"
            )
    if errors:
        raise errors[0]
    return results[0]


def checked_call(call: Callable[[], Result], sample: str) -> Result:
    """The result of a call of the library; `UserError` where it fails."""
    try:
        return call()
    except BaseException as error:
        if not is_failure(error):
            raise
        raise UserError(
            f"the tokenizer fails with {sample[:40]!r} ({first_line(error)}); use a tokenizer that does not"
        ) from error


def is_failure(error: BaseException) -> bool:
    """Whether the library raised this: plain exceptions, and what its Rust code could not bear, which is none."""
    return type(error).__name__ == "PanicException" or (
        isinstance(error, Exception) and not isinstance(error, MemoryError)
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# ---- what a tokenizer.json holds ----


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Settings:
    """An object of JSON: of a name that comes twice, another reader might take the other value."""
    names = dict(pairs)
    if len(names) != len(pairs):
        counted = set[str]()
        twice = next(name for name, _ in pairs if name in counted or counted.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"it has the name {twice[:80]!r} twice in one object")
    return names


def _bytes_of_texts(value: Any) -> int:
    """Bytes of all texts in a list of lists and objects."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, dict):
        return sum(map(_bytes_of_texts, value.values()))
    return sum(map(_bytes_of_texts, value)) if isinstance(value, list) else 0


def _dictionaries(value: Any) -> list[Settings]:
    """All objects in a value of JSON."""
    if isinstance(value, dict):
        return [value, *(inside for part in value.values() for inside in _dictionaries(part))]
    return [inside for part in value for inside in _dictionaries(part)] if isinstance(value, list) else []


def _charsmap(step: Settings) -> str | None:
    table = step.get("precompiled_charsmap")
    return table if isinstance(table, str) else None


def _require_at_most(size_bytes: int, limit_bytes: int, what: str) -> None:
    if size_bytes > limit_bytes:
        raise ValueError(f"{what} {size_bytes:,} bytes, and at most {limit_bytes:,} are read")


def _require_short_tokens(vocabulary: dict[str, int]) -> None:
    longest = max(vocabulary, key=len, default="")
    if len(longest) > LONGEST_TOKEN:
        raise ValueError(
            f"the token that begins with {longest[:40]!r} has {len(longest):,} characters, and at most "
            f"{LONGEST_TOKEN:,} are read"
        )


def _require_one_sequence(inner: tokenizers.Tokenizer, largest: int) -> None:
    """A template around a text has the text once: otherwise a few templates make gigabytes of it."""
    for step in _steps(inner.post_processor):
        if step.get("type") != "TemplateProcessing":
            continue
        if sum("Sequence" in part for part in step["single"]) > 1:
            raise ValueError("its post-processor writes a text more than once")
        for name, special in step["special_tokens"].items():
            if any(token > largest for token in special["ids"]):
                raise ValueError(f"its post-processor writes {name!r} as a token that its vocabulary does not have")


# ---- how much longer steps make a text ----


def _steps(component: Any) -> list[Settings]:
    """The settings of a tokenizer's steps of one kind, as the library itself understood them."""
    if component is None:
        return []
    return _flat(json.loads(component.__getstate__()))


def _flat(step: Settings) -> list[Settings]:
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        if step.get("type") == "Sequence" and name in step:
            return [inner for part in step[name] for inner in _flat(part)]
    return [step]


def _require_growth(factor: float, limit: float, what: str) -> None:
    if factor > limit:
        raise ValueError(
            f"its {what} may make a text {factor:,.0f} times as long, and at most {limit:g} times is accepted"
        )


def _normalizer_growth(step: Settings) -> float:
    kind = step.get("type")
    if kind == "Replace":
        return _replacement_growth(step)
    if kind == "Prepend":  # to every part between added tokens, which may be a single character
        return 1 + _bytes(step["prepend"])
    if kind == "Precompiled":
        return _longest_in_charsmap(_charsmap(step) or "")
    if kind in _SHRINKING:
        return 1
    return _UNICODE_GROWTH.get(str(kind), _UNKNOWN_GROWTH)


def _depends_on_context(step: Settings) -> bool:
    return step.get("type") == "Prepend" or _searches(step)


def _searches(step: Settings) -> bool:
    return "Regex" in step.get("pattern", {})


def _pre_tokenizer_growth(step: Settings) -> float:
    if step.get("type") == "ByteLevel":  # a byte as a character of two, and a space before each part
        return 3 if step.get("add_prefix_space") else 2
    return 4 if step.get("type") == "Metaspace" else 1


def _decoder_growth(step: Settings) -> float:
    if step.get("type") == "Replace":
        return _replacement_growth(step)
    return 2 if step.get("type") in ("WordPiece", "BPEDecoder", "CTC") else 1


def _replacement_growth(step: Settings) -> float:
    pattern = step["pattern"].get("String", "")
    if pattern:
        return max(1.0, _bytes(step["content"]) / _bytes(pattern))
    return 1 + _bytes(step["content"])  # what matches an empty text matches before every character


def _longest_in_charsmap(encoded: str) -> int:
    """The longest text that SentencePiece's table puts in the place of a character: texts end with a zero and follow a
    trie, whose size in bytes is the first number."""
    try:
        table = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError("its table of characters (precompiled_charsmap) is no base64") from error
    trie_bytes = int.from_bytes(table[:4], "little")
    return max(1, *map(len, table[4 + trie_bytes :].split(b"\0")))


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def total_bytes(texts: Sequence[str]) -> int:
    """About how many bytes texts have, for a time limit."""
    return 4 * sum(map(len, texts))
