"""The same files give the same documents, tokens and held-out part, named in a job or given to `data prepare`."""

import csv
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_texts import text_of

from meshwright.data import Corpus, TokenStore, evaluation_windows, prepare, training_stream
from meshwright.data.prepared import Wishes, build, is_prepared, open_prepared
from meshwright.data.prepared import workers as preparing
from meshwright.data.tokenizer import train_tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data

ROWS = 400
TEXTS = [text_of(number) for number in range(ROWS)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


def _csv(path: Path) -> None:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([["id", "text"], *enumerate(TEXTS)])


def _mixed(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    (path / "b.txt").write_text(text_of(1000))
    (path / "c.md").write_text("# A heading\n\n" + text_of(1001))
    _csv(path / "d.csv")
    pq.write_table(pa.table({"text": TEXTS}), path / "e.parquet")


KINDS: dict[str, tuple[Callable[[Path], object], int]] = {
    "a.txt": (lambda path: path.write_text("\n".join(TEXTS)), 1),
    "a.md": (lambda path: path.write_text("\n\n".join(TEXTS)), 1),
    "a.jsonl": (lambda path: path.write_text(LINES), ROWS),
    "a.jsonl.gz": (lambda path: path.write_bytes(gzip.compress(LINES.encode())), ROWS),
    "a.csv": (_csv, ROWS),
    "a.parquet": (lambda path: pq.write_table(pa.table({"text": TEXTS}), path), ROWS),
    "mixed": (_mixed, 3 * ROWS + 2),
}


def content(store: TokenStore) -> tuple[list[int], list[int]]:
    return store.read(0, len(store)).tolist(), store.starts_between(0, len(store)).tolist()


def both_ways(tmp_path: Path, *sources: Path, **fields) -> tuple[Corpus, Corpus]:
    """A job that names the sources, and one that names a folder they were prepared into."""
    named = Data(sources=tuple(map(str, sources)), cache=str(tmp_path / "cache"), **fields)
    wishes = Wishes(named.sources, vocab_size=300, validation_fraction=named.validation_fraction)
    build(wishes, tmp_path / "out", 2)
    return prepare(named, 300), prepare(Data(sources=(str(tmp_path / "out"),)), 300)


@pytest.mark.thorough
@pytest.mark.parametrize("fraction", [0.0, 0.1])
@pytest.mark.parametrize("name", KINDS)
def test_both_ways_give_the_same(tmp_path: Path, name: str, fraction: float) -> None:
    write, documents = KINDS[name]
    write(tmp_path / name)
    direct, prepared = both_ways(tmp_path, tmp_path / name, validation_fraction=fraction)
    assert direct.tokenizer.fingerprint() == prepared.tokenizer.fingerprint()
    assert content(direct.train) == content(prepared.train)
    assert content(direct.validation) == content(prepared.validation)
    starts = [len(content(store)[1]) for store in (direct.train, direct.validation)]
    if documents == 1 and fraction:
        assert starts == [1, 1], "the end of a single document is held out"
    else:
        assert sum(starts) == documents and (starts[1] > 0) == (fraction > 0)


@pytest.mark.thorough
def test_a_large_input_is_numbered_over_all_its_units(tmp_path: Path, monkeypatch) -> None:
    """Whoever reads it, with few units or many: a document is held out by its place in the input alone."""
    (tmp_path / "a.jsonl").write_text("{broken\n" + LINES)
    (tmp_path / "b.txt").write_text("\n".join(TEXTS))
    (tmp_path / "c.jsonl").write_text(LINES)
    sources = tuple(str(tmp_path / name) for name in ("a.jsonl", "b.txt", "c.jsonl"))
    monkeypatch.setattr(preparing, "SMALL_BYTES", 0)
    train_tokenizer(TEXTS, 300).save(tmp_path / "tokenizer.json")
    wishes = Wishes(sources, tmp_path / "tokenizer.json", validation_fraction=0.1)
    found = []
    for number, unit_bytes in enumerate((None, 20_000, 7_000)):
        manifest = build(wishes, tmp_path / str(number), 2, unit_bytes=unit_bytes)
        assert (len(manifest.shards) > 3) == (number > 0)
        found.append((content(open_prepared(tmp_path / str(number)).store("validation")), manifest.source_tokens(3)))
    assert found[0] == found[1] == found[2] and len(found[0][0][1]) > 50


def test_the_end_of_every_part_of_a_long_document_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    manifest = build(Wishes((str(tmp_path / "a.txt"),), vocab_size=300, validation_fraction=0.2), tmp_path / "out", 2,
                     unit_bytes=5_000)  # fmt: skip
    assert manifest.held_out == "ends" and len(manifest.shards) > 3 and manifest.documents["train"] == 1
    assert math.isclose(manifest.tokens["validation"], 0.2 * sum(manifest.tokens.values()), rel_tol=0.02)
    assert manifest.documents["validation"] == len(manifest.shards)


def test_sources_keep_their_bounds_within_a_unit(tmp_path: Path) -> None:
    """A blend draws from each source by its weight, though all lie in one shard."""
    for name, numbers in (("a", range(100)), ("b", range(100, 300))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text_of(n)}) + "\n" for n in numbers))
    data = Data(
        sources=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")),
        weights=(1.0, 3.0),
        cache=str(tmp_path / "cache"),
        validation_fraction=0.1,
    )
    corpus = prepare(data, 300)
    for part, (first, last) in enumerate(((0, 100), (100, 300))):
        tokens = corpus.train.read(*corpus.bounds[part : part + 2]).tolist()
        texts = corpus.tokenizer.decode(tokens).split("<|endoftext|>")[:-1]
        found = [int(text.rpartition(" ")[2].rstrip(".")) for text in texts]
        assert found == sorted(found) and first <= found[0] and found[-1] < last and len(found) > 80
    assert len(training_stream(corpus, data, 16, seed=0).parts) == 2


def test_what_is_not_taken_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text(LINES + "{broken\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    (folder / "no-suffix").write_text("who knows")
    (folder / "empty.txt").write_text(" \n")
    bad, left_out = prepare(Data(sources=(str(folder),), cache=str(tmp_path / "cache")), 300).notes
    assert bad.startswith("left out of data.sources, since they cannot be used: 1 broken JSON") and ":401" in bad
    assert left_out.startswith("left out of data.sources, being of no known kind")
    assert "picture.png" in left_out and "no-suffix" in left_out


def test_a_file_that_is_named_itself_is_text_unless_its_name_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text(text_of(3))
    direct, prepared = both_ways(tmp_path, tmp_path / "corpus")
    assert content(direct.train) == content(prepared.train)
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(UserError, match=r"data\.sources: 1 of 1 documents .* \(1 not UTF-8, first at .*a\.zip"):
        prepare(Data(sources=(str(tmp_path / "a.zip"),), cache=str(tmp_path / "cache")), 300)
    (tmp_path / "a.parquet.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"data\.sources: .*a\.parquet\.gz is not a supported kind of file; give text"):
        prepare(Data(sources=(str(tmp_path / "a.parquet.gz"),), cache=str(tmp_path / "cache")), 300)


def test_the_cache_holds_a_prepared_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    corpus = prepare(Data(sources=(str(tmp_path / "a.jsonl"),), cache=str(tmp_path / "cache")), 300)
    assert is_prepared(str(corpus.folder)) and not (corpus.folder / ".partial").exists()
    again = prepare(Data(sources=(str(corpus.folder),)), 300)
    assert content(again.train) == content(corpus.train)


def test_an_evaluation_set_may_be_of_any_kind(tmp_path: Path) -> None:
    _csv(tmp_path / "a.csv")
    data = Data(sources=(str(tmp_path / "a.csv"),), cache=str(tmp_path / "cache"), validation_fraction=0.0)
    corpus = prepare(data, 300)
    windows = evaluation_windows("evaluation.sets.a", data.sources[0], corpus.tokenizer, data, 300, 16)
    assert np.array_equal(windows.read(5).tokens_S, corpus.train.read(80, 96))
