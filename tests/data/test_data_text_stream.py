"""Tokens as text while they arrive, and prompts as transformers encodes them."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from meshwright.data.text_stream import TextStream
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

TEXT = "the cloud\n a naïve 🙂 drum  and an é at the end"


def sentence_pieces(path: Path) -> Tokenizer:
    """A tokenizer as Llama 2 has one: spaces are part of pieces, other characters may be bytes, and <s> comes first."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thecloudarmn", "▁the", "▁dr"]
    scores = {piece: -float(len(pieces) - len(piece)) for piece in pieces}
    inner = tokenizers.Tokenizer(models.Unigram(list(scores.items()), unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(path / "pieces.json"))
    return load_tokenizer(path / "pieces.json")


def byte_level(path: Path) -> Tokenizer:
    return train_tokenizer(["the drum"], 262)


@pytest.mark.parametrize("made", [sentence_pieces, byte_level])
@pytest.mark.parametrize("names", [True, False])
def test_the_parts_are_the_whole(made, names: bool, tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    ids = tokenizer.encode(TEXT)
    ids.insert(5, tokenizer.end_of_text)
    for first in (0, 1, 6, 20):
        text = TextStream(tokenizer, ids[:first], names=names)
        parts = [text.add(token) for token in ids[first:]]
        whole, before = (tokenizer.decode(some, names=names) for some in (ids, ids[:first]))
        assert "".join([*parts, text.end()]) == whole[len(before) :]
        assert sum(map(bool, parts)) > len(parts) // 2 and not any("\ufffd" in part for part in parts)


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    tokenizer = train_tokenizer([], 257)
    first, *_ = tokenizer.encode("🙂")
    text = TextStream(tokenizer)
    assert (text.add(first), text.end(), text.end()) == ("", "\ufffd", "")


def test_a_prompt_begins_once_as_the_tokenizer_begins_texts(tmp_path: Path) -> None:
    tokenizer = sentence_pieces(tmp_path)
    plain = tokenizer.encode("the drum")
    assert tokenizer.encode_prompt("the drum") == [1, *plain]
    assert tokenizer.encode_prompt("<s>the drum").count(1) == 1
    assert tokenizer.encode_prompt("the</s>")[-1] == 2 != tokenizer.encode("the</s>")[-1]
    assert tokenizer.encode_rendered("the drum") == plain and tokenizer.encode_prompt("") == [1]
    assert (tokenizer.first_control("the</s> <s>"), tokenizer.first_control("the")) == (2, None)


def test_names_in_documents_stay_text() -> None:
    tokenizer = train_tokenizer([TEXT], 300)
    assert tokenizer.encode_prompt("a<|endoftext|>")[-1] == tokenizer.end_of_text
    assert tokenizer.end_of_text not in tokenizer.encode("a<|endoftext|>")
