"""From sources to a cached corpus."""

import itertools
import json
import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
from data_texts import text_of

from meshwright.data import Corpus, TokenStore, prepare
from meshwright.data.raw import Taking, list_inputs, plan_units, read_unit
from meshwright.data.raw.reading import TEXT_BYTES
from meshwright.errors import UserError
from meshwright.job.data import Data

fork = multiprocessing.get_context("fork")


def documents_of(corpus: Corpus, store: TokenStore) -> list[str]:
    """The documents of a store as text, each checked to end with the end of text and to hold no other."""
    assert corpus.tokenizer is not None
    bounds = [*store.starts_between(0, len(store)).tolist(), len(store)]
    documents = [store.read(a, b).tolist() for a, b in itertools.pairwise(bounds)]
    end = corpus.tokenizer.end_of_text
    assert all(tokens.index(end) == len(tokens) - 1 for tokens in documents)
    return [corpus.tokenizer.decode(tokens[:-1]) for tokens in documents]


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_every_kind_of_source_in_order(prepare_from, write):
    folder = Path(write("folder/b.txt", "in a folder")).parent
    write("folder/a/deep.md", "deeper")
    write("folder/.hidden.txt", "hidden")
    write("folder/.git/config.txt", "hidden too")
    write("folder/picture.png", b"\x89PNG\xff")
    lines = write("lines.jsonl", b'\xef\xbb\xbf{"body": "one"}\n\n{"body": " "}\n{"body": "two\\nlines"}')
    named = write("no-suffix", "named \r\n itself")
    corpus = prepare_from(lines, str(folder), named, text_field="body", validation_fraction=0)
    assert documents_of(corpus, corpus.train) == ["one", "two\nlines", "deeper", "in a folder", "named \r\n itself"]
    assert len(corpus.validation) == 0


def test_manifest_states_what_was_made(prepare_from, write):
    source = write("a.txt", text_of(1))
    corpus = prepare_from(source)
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    assert manifest["tokens"] == {"train": len(corpus.train), "validation": len(corpus.validation)}
    assert manifest["dtype"] == "<u2"
    assert [(one["name"], one["bytes"]) for one in manifest["sources"]] == [(source, len(text_of(1)))]
    assert manifest["held_out"] == "ends"
    assert manifest["tokenizer_sha256"] == corpus.tokenizer.fingerprint()


def test_whole_documents_are_held_out(corpus):
    train, validation = (documents_of(corpus, store) for store in (corpus.train, corpus.validation))
    assert sorted(train + validation) == sorted(text_of(number) for number in range(40))
    assert 3 <= len(validation) <= 14


def test_with_few_documents_the_end_of_each_is_held_out(prepare_from, write):
    texts = [text_of(number, words=300) for number in range(3)]
    sources = [write(f"{number}.txt", text) for number, text in enumerate(texts)]
    corpus = prepare_from(*sources, validation_fraction=0.25)
    train, validation = (documents_of(corpus, store) for store in (corpus.train, corpus.validation))
    assert [head + tail for head, tail in zip(train, validation, strict=True)] == texts
    assert len(corpus.validation) == pytest.approx(0.25 * (len(corpus.train) + len(corpus.validation)), rel=0.02)


def test_validation_is_not_empty_when_no_document_falls_to_it(prepare_from, write):
    sources = [write(f"{number}.txt", text_of(number, words=300)) for number in range(25)]
    corpus = prepare_from(*sources, validation_fraction=0.01)
    assert len(corpus.validation) > 0


@pytest.mark.thorough
def test_long_files_are_read_in_pieces(prepare_from, write):
    text = "".join(f"line {number}: ünïcödé {number * number}\n" for number in range(70_000))
    unbroken = "x" * (TEXT_BYTES + 10)
    assert len(text.encode()) > 2 * TEXT_BYTES
    corpus = prepare_from(write("long.txt", text), write("unbroken.txt", unbroken), validation_fraction=0)
    assert documents_of(corpus, corpus.train) == [text, unbroken]


def test_wide_vocabularies_take_four_bytes(prepare_from, write):
    from tokenizers import Tokenizer as RawTokenizer
    from tokenizers import models

    raw = RawTokenizer(models.WordLevel({"?": 0, "word": 69_999, "</s>": 70_000}, unk_token="?"))
    source = write("lines.jsonl", '{"text": "word"}\n{"text": "other"}\n')
    tokenizer = write("tokenizer.json", raw.to_str())
    corpus = prepare_from(source, tokenizer=tokenizer, vocab_size=70_001, validation_fraction=0)
    assert corpus.train.read(0, 9).tolist() == [69_999, 70_000, 0, 70_000]
    assert (corpus.folder / "train-00000.bin").stat().st_size == 16


def test_second_preparation_reads_nothing(prepare_from, write, tmp_path):
    source = Path(write("a.txt", text_of(1)))
    first = prepare_from(str(source))
    status = source.stat()
    # Other content under the same size and time can only go unnoticed if it is not read.
    source.write_text(text_of(2)[: status.st_size].ljust(status.st_size))
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    stages: list[str] = []
    second = prepare_from(str(source), report=lambda stage, fraction: stages.append(stage))
    assert second.folder == first.folder
    assert stages == []
    assert np.array_equal(first.train.read(0, 10**6), second.train.read(0, 10**6))


def test_what_matters_prepares_anew(prepare_from, write, tmp_path):
    source = write("a.jsonl", '{"text": "some words", "body": "other words"}\n')
    base = prepare_from(source)
    base.tokenizer.save(tmp_path / "tokenizer.json")
    given = str(tmp_path / "tokenizer.json")
    with_given = prepare_from(source, tokenizer=given).folder
    # What does not touch the tokens uses them again.
    assert prepare_from(source, workers=7, prefetch=1, mask_documents=True).folder == base.folder
    assert prepare_from(source, tokenizer=given, vocab_size=5000).folder == with_given
    made = {
        base.folder,
        with_given,
        prepare_from(source, text_field="body").folder,
        prepare_from(source, validation_fraction=0.1).folder,
        prepare_from(source, vocab_size=258).folder,
    }
    write("a.jsonl", '{"text": "changed words", "body": "other words"}\n')
    changed = prepare_from(source)
    assert changed.tokenizer.decode(changed.train.read(0, 100).tolist()) == "changed words<|endoftext|>"
    assert len(made | {changed.folder}) == 6


def test_a_damaged_cache_is_prepared_anew(prepare_from, write, tmp_path):
    source = write("a.txt", text_of(1))
    folder = prepare_from(source).folder
    tokens = (folder / "train-00000.bin").read_bytes()
    (folder / "train-00000.bin").write_bytes(tokens[:-2])
    prepare_from(source)
    assert (folder / "train-00000.bin").read_bytes() == tokens
    assert folders(tmp_path / "cache") == [folder.name]


@pytest.mark.parametrize("stage", ["tokenizer", "tokens"])
def test_interrupted_preparation_leaves_nothing(prepare_from, write, tmp_path, stage):
    def interrupt(reached: str, fraction: float) -> None:
        if reached == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_from(write("a.txt", text_of(1)), report=interrupt)
    assert folders(tmp_path / "cache") == []


def test_killed_preparation_leaves_no_finished_folder_and_is_swept(prepare_from, write, tmp_path):
    source = write("a.txt", text_of(1))

    def die(stage: str, fraction: float) -> None:
        if stage == "tokens":
            os.kill(os.getpid(), signal.SIGKILL)

    child = fork.Process(target=prepare_from, args=(source,), kwargs={"report": die})
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.endswith(".partial")
    os.utime(left, (0, 0))
    folder = prepare_from(source).folder
    assert folders(tmp_path / "cache") == [folder.name]


def test_a_living_preparation_is_not_swept(prepare_from, write, tmp_path):
    source, other = write("a.txt", text_of(1)), write("b.txt", text_of(2))

    def prepare_other(stage: str, fraction: float) -> None:
        (building,) = (tmp_path / "cache").glob(".*.partial")
        os.utime(building, (0, 0))
        prepare_from(other)

    assert len(prepare_from(source, report=prepare_other).train) > 0


def test_preparations_at_the_same_time_both_succeed(prepare_from, write, tmp_path):
    source = write("a.txt", text_of(1))
    both = fork.Barrier(2)

    def prepare_in_step() -> None:
        corpus = prepare_from(source, report=lambda stage, fraction: both.wait(30) if stage == "tokens" else None)
        assert len(corpus.train.read(0, 10)) == 10

    children = [fork.Process(target=prepare_in_step) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert len(folders(tmp_path / "cache")) == 1


def test_stores_travel_without_their_content(corpus):
    corpus.train.read(0, 1)
    sent = pickle.dumps(corpus.train)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent).read(5, 50), corpus.train.read(5, 50))


def test_default_cache_follows_the_environment(write, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    corpus = prepare(Data(sources=(write("a.txt", "text"),)), 300)
    assert corpus.folder.parent == tmp_path / "xdg" / "meshwright"


def test_synthetic_tokens_have_no_files():
    corpus = prepare(Data(sources=("builtin:synthetic",)), 128_256)
    assert (corpus.tokenizer, corpus.folder) == (None, None)
    for store in (corpus.train, corpus.validation):
        tokens = store.read(10**11, 10**11 + 50_000)
        assert 0 <= tokens.min() < 1000 < 127_000 < tokens.max() < 128_256
        starts = store.starts_between(10**11, 10**11 + 50_000)
        assert 49 <= len(starts) <= 51
        inside = starts[starts > 10**11] - 10**11
        assert (tokens[inside - 1] == 0).all()
        assert np.array_equal(store.read(10**11 + 7, 10**11 + 3000), tokens[7:3000])
    assert not np.array_equal(corpus.train.read(0, 50), corpus.validation.read(0, 50))


def test_the_standard_library_is_there():
    # Listing only: tokenising all of it takes too long for a test.
    inputs = list_inputs(["builtin:stdlib"])
    assert inputs.size_bytes > 5_000_000
    assert not any("site-packages" in file.name for file in inputs.files)
    documents = read_unit(plan_units(inputs.files)[0], Taking())
    assert any('"""' in getattr(next(documents), "text", "") for _ in range(20))


def test_sources_are_joined_by_key(prepare_from, write, tmp_path):
    papers = write("papers.jsonl", '{"text": "one", "id": 1}\n{"text": "two", "id": "b"}\n{"text": "three", "id": 3}\n')
    notes = write(
        "notes.jsonl", '{"text": "on two", "id": "b"}\n{"text": "on none", "id": 9}\n{"text": "on one", "id": 1}'
    )
    more = write("more.jsonl", '{"text": "again on one", "id": "1"}\n{"text": "and again", "id": 1}\n')
    corpus = prepare_from(papers, notes, more, join="id", validation_fraction=0)
    assert documents_of(corpus, corpus.train) == [
        "one\n\non one\n\nagain on one\n\nand again",
        "two\n\non two",
        "three",
    ]
    assert corpus.bounds == (0, len(corpus.train))
    assert prepare_from(papers, notes, more, validation_fraction=0).folder != corpus.folder
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("second", "fields", "match"),
    [
        (
            "",
            {"join": "key"},
            r"data\.sources: 1 of 1 documents cannot be used \(1 no key, first at .*\.jsonl:1\).* data\.join",
        ),
        ('{"text": "x", "id": true}', {"join": "id"}, r"1 no key, first at .*b\.jsonl:1"),
        (None, {"join": "id"}, r'data\.join = "id" needs two data\.sources or more'),
    ],
)
def test_what_cannot_be_joined_is_named(prepare_from, write, second, fields, match):
    first = write("a.jsonl", '{"text": "one", "id": 1}\n')
    others = [] if second is None else [write("b.jsonl", second)]
    with pytest.raises(UserError, match=match):
        prepare_from(first, *others, **fields)


def test_plain_text_cannot_be_joined(prepare_from, write):
    with pytest.raises(
        UserError, match=r"data\.sources: .*/b\.txt is plain text, in which there are no fields; give \.jsonl"
    ):
        prepare_from(write("a.jsonl", '{"text": "one", "id": 1}\n'), write("b.txt", "text"), join="id")
