"""The tokenizer, trained here or given."""

import os
import random
import signal
import subprocess
import sys

from data_texts import text_of
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from meshwright.data.tokenizer import load_tokenizer, train_tokenizer

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


def test_a_forked_child_can_encode_where_threads_were_asked_for():
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
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True)
    try:
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
