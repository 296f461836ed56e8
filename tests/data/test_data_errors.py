"""Every mistake in the data section ends in one sentence that names the field, the place and the remedy."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from meshwright.errors import UserError


def refused(match: str):
    return pytest.raises(UserError, match=match)


def test_missing_file(prepare_from):
    with refused(r"data\.sources: .*/nowhere\.txt does not exist .*; correct the path$"):
        prepare_from("nowhere.txt")


@pytest.mark.parametrize("content", ["", " \n\t\n"])
@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_empty_file(prepare_from, write, name, content):
    with refused(rf"data\.sources: .*{name} holds no text to train on; put some there or remove it"):
        prepare_from(write("full.txt", "some text"), write(name, content))


def test_folder_without_text(prepare_from, write):
    folder = str(Path(write("folder/picture.png", b"\x89PNG")).parent)
    with refused(r"data\.sources: the folder .*/folder holds no text, \.jsonl, .* or \.zst; name another"):
        prepare_from(folder)


def test_unknown_builtin(prepare_from):
    with refused(r'data\.sources: "builtin:wikipedia" holds no files.*choose builtin:stdlib, or builtin:synthetic'):
        prepare_from("builtin:wikipedia")


def test_synthetic_beside_others(prepare_from, write):
    with refused(r"data\.sources mixes builtin:synthetic with 1 other; leave it alone"):
        prepare_from("builtin:synthetic", write("a.txt", "text"))


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"text": "cut', r"1 of 3 documents cannot be used \(1 broken JSON, first at .*lines\.jsonl:3\), more than"),
        (b"[" * 100_000, r"1 broken JSON, first at .*lines\.jsonl:3\)"),
        (
            b'{"body": "b", "id": 1}',
            r"1 wrong field, .*:3 \(no \"text\", only 'body', 'id'\)\).*data\.text_field",
        ),
        (b'{"messages": []}', r"only 'messages'; data\.format = \"conversations\" \(--format conversations\)"),
        (b'["text"]', r"1 wrong field, first at .*:3 \(a list and no object\)"),
        (b'{"text": 12}', r'1 wrong field, first at .*:3 \(a int in "text"\)'),
        (b'{"text": "caf\xe9"}', r"1 not UTF-8, first at .*lines\.jsonl:3\)"),
        (b'{"text": "\\ud800 alone"}', r"1 not UTF-8, first at .*lines\.jsonl:3\)"),
    ],
)
def test_bad_jsonl_line(prepare_from, write, line, match):
    with refused(match):
        prepare_from(write("lines.jsonl", b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n'))


@pytest.mark.parametrize("content", [b"caf\xe9 au lait", b"cut in a character \xe2\x82"])
def test_text_that_is_not_utf8(prepare_from, write, content):
    with refused(r"data\.sources: 1 of 1 documents cannot be used \(1 not UTF-8, first at .*/latin\.txt\)"):
        prepare_from(write("latin.txt", content))


def test_missing_tokenizer(prepare_from, write):
    with refused(r"data\.tokenizer = gone\.json cannot be read \(No such file.*\); correct the path, or leave it out"):
        prepare_from(write("a.txt", "text"), tokenizer="gone.json")


def test_tokenizer_is_a_folder(prepare_from, write, tmp_path):
    with refused(r"data\.tokenizer = .* is a folder; name the tokenizer\.json itself"):
        prepare_from(write("a.txt", "text"), tokenizer=str(tmp_path))


@pytest.mark.parametrize("content", [b"{", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_broken_tokenizer(prepare_from, write, content):
    with refused(r"data\.tokenizer = .*/tokenizer\.json is not a working tokenizer\.json"):
        prepare_from(write("a.txt", "text"), tokenizer=write("tokenizer.json", content))


def test_tokenizer_without_end_of_text(prepare_from, write):
    content = RawTokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).to_str()
    with refused(r"has no end-of-text token \(looked for <\|endoftext\|>, <\|end_of_text\|>, </s>, <eos>\)"):
        prepare_from(write("a.txt", "text"), tokenizer=write("tokenizer.json", content))


def test_tokenizer_larger_than_the_model(prepare_from, write):
    # An identifier beyond the count of entries must be refused too: it would index outside the embedding.
    content = RawTokenizer(models.WordLevel({"a": 0, "</s>": 99}, unk_token="a")).to_str()
    with refused(r"has 100 entries but model\.vocab_size = 50; set model\.vocab_size to at least 100"):
        prepare_from(write("a.txt", "text"), tokenizer=write("tokenizer.json", content), vocab_size=50)


def test_vocabulary_smaller_than_the_bytes(prepare_from, write):
    with refused(r"model\.vocab_size = 256 is too small for a byte-level tokenizer; choose at least 257"):
        prepare_from(write("a.txt", "text"), vocab_size=256)


def test_cache_that_cannot_be_written(prepare_from, write):
    cache = write("occupied", "a file where the cache folder should be")
    with refused(r"data\.cache: .*/occupied cannot be written \(.*\); set data\.cache to a folder you may write to"):
        prepare_from(write("a.txt", "text"), cache=cache)


def test_source_that_changes_while_it_is_read(prepare_from, write, tmp_path):
    source = write("a.txt", "text")
    with refused(r"data\.sources: .*/a\.txt changed while it was read; start again when nothing writes to it"):
        prepare_from(source, report=lambda stage, fraction: write("a.txt", "text and more"))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A real disk of 64 KiB where mounting is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(prepare_from, write, small_disk):
    lines = "".join(json.dumps({"text": os.urandom(500).hex()}) + "\n" for _ in range(200))
    source = write("lines.jsonl", lines)
    with refused(
        rf"data\.cache: the disk or quota of {small_disk} is full, .* up to {2 * len(lines)} bytes there; free"
    ):
        prepare_from(source, cache=str(small_disk))
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_noticed_when_syncing(prepare_from, write, monkeypatch, tmp_path, number):
    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with refused(r"data\.cache: the disk or quota of .*/cache is full, and preparing needs up to 8 bytes there"):
        prepare_from(write("a.txt", "text"))
    assert list((tmp_path / "cache").iterdir()) == []
