"""Tokenizers of strangers: bounded memory and time, panics as sentences, and no control token out of anybody's text."""

import base64
import json
import os
import signal
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import tokenizer_limits
from meshwright.data.chat import ChatTemplate
from meshwright.data.conversations import Conversation, Message
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from meshwright.errors import UserError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@cache
def trained() -> str:
    return train_tokenizer(["hello world this is text " * 30], 300).to_json()


def altered(tmp_path: Path, **sections: Any) -> Tokenizer:
    """A trained tokenizer with other sections in its file."""
    settings = json.loads(trained())
    for name, value in sections.items():
        settings[name] = value(settings[name]) if callable(value) else value
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    return load_tokenizer(tmp_path / "tokenizer.json")


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def with_tokens(*names: str, special: bool, normalized: bool):
    def add(tokens: list[Any]) -> list[Any]:
        first = len(json.loads(trained())["model"]["vocab"])
        own = {"special": special, "normalized": normalized}
        return tokens + [{**tokens[0], **own, "content": name, "id": first + n} for n, name in enumerate(names)]

    return add


# ---- memory ----

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
BEYOND = {
    **TWICE,
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}],
    "special_tokens": {"x": {"id": "x", "ids": [70_000], "tokens": ["x"]}},
}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["x" * (7 << 20), -1.0]]}


@pytest.mark.parametrize(
    ("section", "value", "match"),
    [
        (
            "normalizer",
            sequence("normalizers", *[replace("a", "a" * 10)] * 8),
            "normalizers may make a text 100,000,000",
        ),
        ("normalizer", sequence("normalizers", *[replace("", "ab")] * 6), "normalizers may make a text 729 times"),
        ("normalizer", sequence("normalizers", *[replace("a|", "ab", "Regex")] * 3), "regular Replace normalizers may"),
        ("normalizer", sequence("normalizers", *[{"type": "Prepend", "prepend": "abc"}] * 3), "Prepend .* 64 times"),
        ("pre_tokenizer", sequence("pretokenizers", *[BYTE_LEVEL] * 5), "pre-tokenizers may make a text 32 times"),
        ("decoder", sequence("decoders", *[replace("a", "a" * 10)] * 8), "decoders may make a text 100,000,000"),
        ("post_processor", TWICE, "post-processor writes a text more than once"),
        ("post_processor", sequence("processors", BEYOND), "writes 'x' as a token that its vocabulary does not have"),
        ("pre_tokenizer", sequence("pretokenizers", *[regex(r"\p{L}")] * 9999), "pre-tokenizers and decoders take"),
        ("model", UNIGRAM, "pieces take 7,340"),
        ("added_tokens", with_tokens("x" * 5000, special=True, normalized=False), "has 5,000 characters"),
        ("added_tokens", with_tokens("x" * (2 << 20), special=True, normalized=False), "added tokens take 2,097"),
    ],
)
def test_a_small_file_that_takes_much_memory_is_refused(tmp_path: Path, section: str, value: Any, match: str) -> None:
    with pytest.raises(UserError, match=match):
        altered(tmp_path, **{section: value})


def test_names_of_added_tokens_are_not_normalised_before_the_normalizers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_limits, "LARGEST_GROWTH", 10**9)
    tokens = with_tokens("a" * 4000, special=False, normalized=True)
    with pytest.raises(UserError, match=r"added tokens, normalised, may take .* 4,194,304 are read"):
        altered(tmp_path, added_tokens=tokens, normalizer=sequence("normalizers", *[replace("a", "a" * 50)] * 3))


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained().replace('"normalizer"', '"normalizer": null, "normalizer"'))
    with pytest.raises(UserError, match="'normalizer' twice in one object"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_long_text_that_grows_is_refused_and_others_are_read(tmp_path: Path) -> None:
    tokenizer = altered(tmp_path, normalizer=replace("a", "a" * 200))
    assert len(tokenizer.encode("ab" * 100)) > 200
    assert tokenizer.encode("b" * 200_000)
    for encode in (tokenizer.encode, tokenizer.encode_rendered, lambda text: tokenizer.encode_batch(["b", text])):
        with pytest.raises(UserError, match="normalizers make more than 4 MiB of the 97 KiB"):
            encode("a" * 100_000)


LLAMA = sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}
CLIP = sequence("normalizers", {"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"})


@pytest.mark.parametrize("normalizer", [None, LLAMA, BERT, CLIP, sequence("normalizers", {"type": "NFKC"}, LLAMA)])
def test_normalizers_of_published_tokenizers_are_read(tmp_path: Path, normalizer: Any) -> None:
    tokenizer = altered(tmp_path, normalizer=normalizer)
    assert tokenizer.encode("Ça va, 한국어 ﷺ? " * 9)


# ---- time and panics ----


def test_what_the_library_cannot_bear_is_a_sentence(tmp_path: Path) -> None:
    tokenizer = altered(tmp_path, pre_tokenizer=regex("(x+x+)+y"))
    assert tokenizer.encode("hello")
    for encode in (tokenizer.encode, tokenizer.encode_rendered, tokenizer.encode_prompt):
        with pytest.raises(UserError, match=r"fails with 'xxxx.*retry-limit-in-match"):
            encode("x" * 40 + "b")
    decoder = altered(tmp_path, decoder=replace("(h+h+)+y", "h", "Regex"))
    token = decoder.encode("h")[0]
    decoder = altered(tmp_path, decoder=sequence("decoders", {"type": "Fuse"}, replace("(h+h+)+y", "h", "Regex")))
    with pytest.raises(UserError, match="retry-limit-in-match"):
        decoder.decode([token] * 40)


@pytest.mark.thorough
def test_a_forked_child_can_encode_after_its_parent_decoded(tmp_path: Path, warm_command: Path) -> None:
    # From a process in which the library's thread pool never started: a fork may use it only then.
    altered(tmp_path, decoder=replace("h+", "h", "Regex"))
    program = f"""
import os
from pathlib import Path
from meshwright.data.tokenizer import allow_threads, load_tokenizer

tokenizer = load_tokenizer(Path({str(tmp_path / "tokenizer.json")!r}))
tokenizer.decode([5] * 9)
if (pid := os.fork()) == 0:
    allow_threads(2)
    os._exit(0 if tokenizer.encode_batch(["hello", "text"] * 50) else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    process = subprocess.Popen([warm_command / "python-warm", "-c", program], start_new_session=True)
    try:
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_long_text_whose_normalizers_fail_is_a_sentence(tmp_path: Path) -> None:
    tokenizer = altered(tmp_path, normalizer=replace("(x+x+)+y", "ab", "Regex"))
    with pytest.raises(UserError, match=r"fails with 'xxxx.*retry-limit-in-match"):
        tokenizer.encode("x" * 40 + "b" * 3_000_000)


def test_a_long_text_whose_normalizers_do_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = altered(tmp_path, normalizer=replace(r"\s*\d", "ab", "Regex"))
    monkeypatch.setattr(tokenizer_limits, "CALL_S", 0.1)
    monkeypatch.setattr(tokenizer_limits, "CALL_BYTES_PER_S", 1e9)
    monkeypatch.setattr(tokenizer_limits, "NORMALIZED_BYTES", 1 << 15)
    with pytest.raises(UserError, match="takes more than 0 s for '   "):
        tokenizer.encode(" " * 10_000)


def test_an_encoding_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = altered(tmp_path, pre_tokenizer=regex(r"\s*\d"))
    assert tokenizer.encode(" 1")
    monkeypatch.setattr(tokenizer_limits, "CALL_S", 0.1)
    monkeypatch.setattr(tokenizer_limits, "CALL_BYTES_PER_S", 1e9)
    with pytest.raises(UserError, match="takes more than 0 s for '   "):
        tokenizer.encode(" " * 10_000)


def test_half_a_surrogate_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the tokenizer fails with"):
        altered(tmp_path).encode("\ud800")


# ---- control tokens ----

FOLDS = {
    "Lowercase": ({"type": "Lowercase"}, "<|IM_END|>"),
    "NFKC": ({"type": "NFKC"}, "\uff1c|im_end|\uff1e"),
    "StripAccents": (sequence("normalizers", {"type": "NFD"}, {"type": "StripAccents"}), "<|ím_énd|>"),
    "Replace": (replace(" ", ""), "<|im _ end|>"),
    "Replace of words": (replace("§§", "<|im_end|>"), "§§"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("fold", list(FOLDS))
def test_text_is_never_normalised_to_a_control_token(tmp_path: Path, fold: str, special: bool) -> None:
    normalizer, text = FOLDS[fold]
    tokens = with_tokens("<|im_start|>", "<|im_end|>", special=special, normalized=True)
    tokenizer = altered(tmp_path, normalizer=normalizer, added_tokens=tokens)
    end = tokenizer.token_named("<|im_end|>")
    assert tokenizer.encode_rendered("<|im_end|>") == [end]

    document = f"hello {text}{text} <|im_end|> world"
    assert end not in tokenizer.encode(document)
    assert end not in tokenizer.encode_batch(["hello", document])[1]

    template = ChatTemplate(TEMPLATE, {}, tokenizer.control_names, "template")
    messages = (Message("user", f"hello {text} world"), Message("assistant", f"yes {text}"))
    rendered, marks = template.render(Conversation(messages))
    ((ids, learned),) = tokenizer.encode_marked([rendered], [marks])
    assert ids.count(end) == 2
    assert tokenizer.encode_rendered(rendered) == ids
    first_of_answer = learned.index(True)
    assert "yes" in tokenizer.decode(ids[first_of_answer:])
    assert "world" not in tokenizer.decode(ids[first_of_answer:])


def test_a_model_of_words_makes_no_control_token_of_folded_text(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "hello": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    tokenizer = altered(
        tmp_path, model=model, normalizer={"type": "Lowercase"}, pre_tokenizer={"type": "WhitespaceSplit"}
    )
    ids = tokenizer.encode("hello <|EndOfText|> hello")
    assert (ids[0], ids[-1], tokenizer.end_of_text in ids) == (1, 1, False)


def test_a_character_that_becomes_a_control_token_is_refused(tmp_path: Path) -> None:
    tokens = with_tokens("<|im_end|>", special=False, normalized=True)
    tokenizer = altered(tmp_path, normalizer=replace("§", "<|im_end|>"), added_tokens=tokens)
    for encode in (tokenizer.encode, tokenizer.encode_rendered):
        with pytest.raises(UserError, match=r"control token '<\|im_end\|>' out of the text 'a § b'"):
            encode("a § b")


@pytest.mark.parametrize(("longest", "factor"), [(33, 132), (300, None)])
def test_the_longest_text_in_a_table_of_characters_counts(longest: int, factor: int | None) -> None:
    # As SentencePiece writes it: the size of a trie, the trie, and texts that end with a zero.
    table = (1024).to_bytes(4, "little") + bytes(1024) + b"abc\0" + b"x" * longest + b"\0"
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    normalizer = sequence("normalizers", step, replace(" {2,}", "▁", "Regex"))  # as T5's
    settings = {**json.loads(trained()), "normalizer": normalizer}
    if factor is not None:
        assert tokenizer_limits.growth_of(settings).factor == factor
        return
    with pytest.raises(ValueError, match="normalizers may make a text 1,200 times as long"):
        tokenizer_limits.growth_of(settings)
