"""The tokenizer, trained here or given."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from data_texts import text_of
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from meshwright.data.tokenizer import load_tokenizer, train_tokenizer
from meshwright.errors import UserError

TEXTS = [text_of(number) for number in range(50)]


def test_any_text_survives():
    tokenizer = train_tokenizer(TEXTS, 400)
    chance = random.Random(1)
    strange = "".join(chr(chance.randrange(32, 0xD800)) + chr(chance.randrange(0xE000, 0x110000)) for _ in range(150))
    for text in ("", "  leading\n\n\ttabs ", "naïve 🙂 \x00\x7f", strange):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_training_is_deterministic(tmp_path):
    for name in ("a", "b"):
        train_tokenizer(iter(TEXTS), 400).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_saved_and_loaded_is_the_same(tmp_path):
    trained = train_tokenizer(TEXTS, 400)
    trained.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode(TEXTS[3]) == trained.encode(TEXTS[3])
    assert (loaded.vocab_size, loaded.end_of_text) == (trained.vocab_size, trained.end_of_text)
    assert 257 <= loaded.vocab_size <= 400
    assert loaded.fingerprint() == trained.fingerprint()


def test_text_cannot_fake_the_end_of_a_document():
    tokenizer = train_tokenizer(TEXTS, 300)
    text = "before <|endoftext|> after"
    assert tokenizer.end_of_text not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_of_text_of_a_given_tokenizer_and_no_cutting(tmp_path):
    raw = RawTokenizer(models.WordLevel({"?": 0, "hello": 1, "</s>": 2}, unk_token="?"))
    raw.enable_truncation(1)
    raw.enable_padding(length=8)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.end_of_text == 2
    assert tokenizer.encode("hello") == [1]


def test_a_forked_child_can_encode():
    tokenizer = train_tokenizer(TEXTS, 300)
    expected = tokenizer.encode_batch(TEXTS)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if tokenizer.encode_batch(TEXTS) == expected else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.thorough
def test_a_forked_child_can_encode_where_threads_were_asked_for(warm_command: Path):
    # As in a rank that a launcher started: the launcher's own setting is in its environment.
    program = """
import os
from meshwright.data.tokenizer import train_tokenizer

tokenizer = train_tokenizer(["one text", "another text"] * 50, 300)
expected = tokenizer.encode_batch(["one", "text"] * 50)
if (pid := os.fork()) == 0:
    os._exit(0 if tokenizer.encode_batch(["one", "text"] * 50) == expected else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    process = subprocess.Popen([warm_command / "python-warm", "-c", program], env=environment, start_new_session=True)
    try:
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def altered(tmp_path: Path, change) -> Path:
    told = json.loads(train_tokenizer(["hello world this is text " * 30], 300).to_json())
    change(told)
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    return tmp_path / "tokenizer.json"


def not_special(told) -> None:
    told["added_tokens"][0]["special"] = False


def of_words(told) -> None:
    told["model"] = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "hello": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    told["pre_tokenizer"] = {"type": "WhitespaceSplit"}


def control_beside(told) -> None:
    entry = dict(told["added_tokens"][0], content="<|im_end|>", special=False, id=len(told["model"]["vocab"]))
    told["added_tokens"].append(entry)


@pytest.mark.parametrize("change", [lambda told: None, not_special, of_words, control_beside])
def test_text_never_becomes_a_control_token(tmp_path: Path, change) -> None:
    tokenizer = load_tokenizer(altered(tmp_path, change))
    text = "hello <|endoftext|> <|endoftext|><|im_end|> hello"
    for tokens in (tokenizer.encode(text), tokenizer.encode_batch(["hello", text])[1]):
        assert not {tokenizer.end_of_text, *(tokenizer.encode_marked([name], [()])[0][0][0] for name in
                    tokenizer.control_names)} & set(tokens)  # fmt: skip
        assert change is of_words or tokenizer.decode(tokens) == text
    assert tokenizer.byte_lengths()[tokenizer.end_of_text] == 0


def test_tokens_that_were_added_for_the_text_stay(tmp_path: Path) -> None:
    def add(told) -> None:
        entry = dict(told["added_tokens"][0], content="        ", special=False, id=len(told["model"]["vocab"]))
        told["added_tokens"].append(entry)

    tokenizer = load_tokenizer(altered(tmp_path, add))
    assert tokenizer.vocab_size - 1 in tokenizer.encode("if x:\n        return")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda told: told["added_tokens"][0].update(id=99999), r"'<\|endoftext\|>' with the identifier 99999"),
        (lambda told: told["model"]["vocab"].update(h=4_000_000_000), "identifier 4000000000, beyond the 16777216"),
        (lambda told: told["added_tokens"].append(3), "is not a working tokenizer.json"),
    ],
)
def test_identifiers_beyond_the_vocabulary_are_refused(tmp_path: Path, change, match: str) -> None:
    with pytest.raises(UserError, match=match):
        load_tokenizer(altered(tmp_path, change))
