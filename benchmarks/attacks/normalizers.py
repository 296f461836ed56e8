"""Tokenizers whose steps grow texts, search for ever or make control tokens out of what somebody wrote."""

import functools
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attacks.archives import TEXTS
from attacks.case import Case, Family, Refused
from attacks.tokenizers_given import CHATML

START, END = "<|im_start|>", "<|im_end|>"
FOLDED = [END.upper(), END.replace("<", "\uff1c").replace(">", "\uff1e"), "<|ím_énd|>", "<|im_ end|>", "§", "§§", "§§§"]
WORDS = ["hello ", "a" * 400, "x" * 40 + "b", " " * 3000, "ﷺ" * 50, "é" * 99, "\0", "한국어", "<|im", "_end|>", *FOLDED]
PATTERNS = [r"\s+", "(x+x+)+y", r"\s*\d", "a|", "(?:a|aa)+$", r"\p{L}+", "", "(?=a)", ".", r"(a*)*b", r"\X", "^", "$"]


@functools.cache
def settings() -> str:
    """A real tokenizer's file."""
    from meshwright.data.tokenizer import train_tokenizer

    return train_tokenizer(TEXTS, 290).to_json()


def draw(chance: random.Random) -> Iterator[Case]:
    """An endless stream of tokenizers."""
    settings()
    for number in range(1 << 62):
        yield Case(f"{number}", partial(_run, f"{number} {chance.random()}"), seconds=90.0)


def _run(seed: str, folder: Path) -> None:
    from meshwright.data import tokenizer_limits
    from meshwright.data.chat import ChatTemplate
    from meshwright.data.conversations import BadConversation, Conversation, Message
    from meshwright.data.tokenizer import load_tokenizer

    tokenizer_limits.CALL_S, tokenizer_limits.CALL_BYTES_PER_S = 2.0, 1_000_000  # type: ignore[misc]
    chance = random.Random(seed)
    (folder / "tokenizer.json").write_text(json.dumps(_changed(chance)))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    control = {tokenizer.end_of_text} | {tokenizer.token_named(name) for name in (START, END)}

    texts = ["".join(chance.choices(WORDS, k=chance.randint(1, 6))) * chance.choice([1, 1, 1, 30]) for _ in range(3)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert control.isdisjoint(ids), f"a control token out of {text[:80]!r}"
        tokenizer.decode(ids[:1000])

    template = ChatTemplate(CHATML, {}, tokenizer.control_names, "template")
    messages = [Message(role, text) for role, text in zip(("system", "user", "assistant"), texts, strict=True)]
    try:
        rendered, marks = template.render(Conversation(tuple(messages)))
    except BadConversation as error:
        raise Refused(str(error)) from error
    ((ids, _),) = tokenizer.encode_marked([rendered], [marks])
    for name in (START, END):
        assert ids.count(tokenizer.token_named(name)) <= len(messages), f"more {name} than the template wrote"


def _changed(chance: random.Random) -> dict[str, Any]:
    """The tokenizer with steps of a stranger, and with control tokens that are found in normalised text."""
    told = json.loads(settings())
    for number, name in enumerate((START, END)):
        flags = {"normalized": chance.random() < 0.8, "special": chance.random() < 0.5}
        identifier = len(told["model"]["vocab"]) + number
        told["added_tokens"].append({**told["added_tokens"][0], **flags, "content": name, "id": identifier})
    told["normalizer"] = _sequence("normalizers", [_normalizer(chance) for _ in range(chance.choice([1, 1, 2, 3, 9]))])
    if chance.random() < 0.3:
        split = {"type": "Split", "pattern": _pattern(chance), "behavior": "Isolated", "invert": False}
        byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        steps = chance.choice([[split, byte_level], [byte_level] * chance.choice([2, 20]), [split]])
        told["pre_tokenizer"] = _sequence("pretokenizers", steps)
    if chance.random() < 0.2:
        told["decoder"] = _sequence("decoders", [_replacement(chance) for _ in range(chance.choice([1, 9]))])
    return told


def _sequence(name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", name: steps}


def _normalizer(chance: random.Random) -> dict[str, Any]:
    kinds = ["Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Nmt"]
    kind = chance.choice([*kinds, "Replace", "Replace", "Replace", "Prepend"])
    if kind == "Replace":
        return _replacement(chance)
    return {"type": kind, "prepend": chance.choice(["▁", "x" * 200])} if kind == "Prepend" else {"type": kind}


def _replacement(chance: random.Random) -> dict[str, Any]:
    growing = {"pattern": {"String": "a"}, "content": "a" * chance.choice([2, 10, 200, 100_000])}
    folding = {"pattern": {"String": chance.choice(["§", "§§", "§§§", " "])}, "content": chance.choice([END, "", "_"])}
    return {"type": "Replace", **chance.choice([growing, folding, {"pattern": _pattern(chance), "content": "ab"}])}


def _pattern(chance: random.Random) -> dict[str, str]:
    return {"Regex": chance.choice(PATTERNS)}


NORMALIZERS = Family("normalizers", draw, weight=0.5)
