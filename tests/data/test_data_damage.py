"""Prepared tokens that were altered where they lie: nothing in them is trusted, and what is wrong is named."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_texts import text_of

from meshwright.data import Corpus, prepare, training_stream
from meshwright.data.prepared import Wishes, build, inspect, verify
from meshwright.data.raw import list_inputs, plan_units
from meshwright.data.tokenizer import train_tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text_of(n)}) + "\n" for n in range(60)))
    train_tokenizer([text_of(n) for n in range(20)], 300).save(folder / "tokenizer.json")
    build(Wishes((str(folder / "texts.jsonl"),), folder / "tokenizer.json"), folder / "prepared", 1)
    return folder / "prepared"


@pytest.fixture
def prepared(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "prepared"))


def read_all(folder: Path, packing: str = "concatenate") -> int:
    data = Data(sources=(str(folder),), mask_documents=True, packing=packing)
    windows = training_stream(prepare(data, 300), data, 16, seed=0).parts[0]
    for window in range(len(windows)):
        windows.read(window)
        windows.count_valid(window)
    return len(windows)


def change_manifest(folder: Path, change) -> None:
    told = json.loads((folder / "manifest.json").read_text())
    change(told)
    (folder / "manifest.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["tokens"].pop("train"),
        lambda told: told["tokens"].update(train=1 << 40),
        lambda told: told["shards"][0]["train"].update(tokens=-5),
        lambda told: told["shards"][0]["train"].update(tokens=1 << 62),
        lambda told: told.update(dtype="O"),
        lambda told: told.update(dtype="<f8"),
        lambda told: told.update(vocab_size=1 << 40),
        lambda told: told.update(end_of_text=-1),
        lambda told: told["bad"].update(odd={"count": 1}),
        lambda told: told.update(shards={}),
    ],
)
def test_a_manifest_that_does_not_fit_together_is_damaged(prepared: Path, change) -> None:
    change_manifest(prepared, change)
    for look in (read_all, inspect, verify):
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            look(prepared)


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(prepared: Path) -> None:
    tokens = np.memmap(prepared / "train-00000.bin", "<u2", "r+")
    tokens[123] = 60_000
    tokens.flush()
    with pytest.raises(UserError, match=r"train-00000\.bin holds the token 60000 at place 123 where there are \d+"):
        read_all(prepared)


@pytest.mark.parametrize("values", [[-5, 7], [0, 1 << 60], [0, 500, 20, 30]])
def test_starts_that_make_no_sense_are_refused(prepared: Path, values) -> None:
    starts = np.load(prepared / "train-00000.documents.npy")
    starts[: len(values)] = values
    np.save(prepared / "train-00000.documents.npy", starts)
    try:
        read_all(prepared)
    except UserError as error:
        assert "train-00000.documents.npy" in str(error)


@pytest.mark.parametrize("array", [np.zeros((3, 3), np.int64), np.zeros(9), np.array([b"x" * 8])])
def test_an_index_of_another_kind_is_refused(prepared: Path, array) -> None:
    np.save(prepared / "train-00000.documents.npy", array)
    size = (prepared / "train-00000.documents.npy").stat().st_size
    files = "train-00000.documents.npy"
    change_manifest(prepared, lambda told: told["shards"][0]["train"]["files"][files].update(bytes=size))
    with pytest.raises(UserError, match=r"documents\.npy is gone, damaged or was cut short"):
        read_all(prepared)


def test_a_packed_index_that_was_altered_is_made_again_or_named(prepared: Path) -> None:
    count = read_all(prepared, "best-fit")
    rng = random.Random(3)
    for path in sorted(prepared.glob("train.best-fit*")):
        kept = path.read_bytes()
        for _ in range(12):
            raw = bytearray(kept)
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            path.write_bytes(raw)
            try:
                assert read_all(prepared, "best-fit") == count
            except UserError as error:
                assert "index" in str(error) or "cut short" in str(error)
            path.write_bytes(kept)


def test_tokens_in_the_cache_that_were_altered_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text_of(1, 300))
    data = Data(sources=(str(tmp_path / "a.txt"),), cache=str(tmp_path / "cache"))

    def tokens(corpus: Corpus) -> list[int]:
        return corpus.train.read(0, len(corpus.train)).tolist()

    first = prepare(data, 300)
    right, folder = tokens(first), first.folder
    for name, change in (
        ("manifest.json", lambda raw: raw.replace(b'"identity"', b'"identities"')),
        ("manifest.json", lambda raw: raw.replace(b"<u2", b"|O8")),
        ("manifest.json", lambda raw: b"[" * 100_000),
        ("tokenizer.json", lambda raw: raw[:-9]),
        ("train-00000.documents.npy", lambda raw: raw[:-8]),
        ("train-00000.bin", lambda raw: raw[:-1]),
    ):
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        assert tokens(prepare(data, 300)) == right, name


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_large_file_under_a_tables_name_is_named_where_it_is_parted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("no table at all\n" * 20_000)
    with pytest.raises(UserError, match=rf"{name} "):
        plan_units(list_inputs([str(tmp_path)]).files, 1 << 16)
