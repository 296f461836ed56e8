"""A prepared folder is the same bytes for any number of workers and any number of kills, and says when it is not."""

import hashlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from data_texts import text_of
from waiting import wait_for_file

from meshwright.data import prepare
from meshwright.data.prepared import Wishes, build, inspect, open_prepared, verify
from meshwright.data.tokenizer import train_tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data

DOCUMENTS = 400
UNIT_BYTES = 8_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL with one bad line, small texts, and a text that is longer than a unit."""
    folder = tmp_path_factory.mktemp("source")
    lines = [json.dumps({"text": text_of(number)}) for number in range(DOCUMENTS)]
    lines[7] = "{broken"
    (folder / "lines.jsonl").write_text("\n".join(lines))
    (folder / "long.txt").write_text("\n".join(text_of(number) for number in range(1000, 1100)))
    for number in range(5):
        (folder / f"small{number}.txt").write_text(text_of(2000 + number))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([text_of(number) for number in range(50)], 300).save(path)
    return path


@pytest.fixture(scope="module")
def wishes(source: Path, tokenizer: Path) -> Wishes:
    return Wishes((str(source),), tokenizer, validation_fraction=0.1)


@pytest.fixture(scope="module")
def folder(wishes: Wishes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared once, undisturbed, by one worker."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    build(wishes, out, 1, unit_bytes=UNIT_BYTES)
    return out


def hash_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(path.relative_to(folder).as_posix().encode() + (path.read_bytes() if path.is_file() else b"/"))
    return digest.hexdigest()


def test_every_document_is_there_once_with_its_boundaries(folder: Path) -> None:
    prepared = open_prepared(folder)
    texts = []
    for split in ("train", "validation"):
        store = prepared.store(split)
        starts = store.starts_between(0, len(store))
        assert len(starts) == prepared.manifest.documents[split]
        ends = np.append(starts[1:], len(store))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            tokens = store.read(start, end).tolist()
            assert tokens[-1] == prepared.tokenizer.end_of_text
            texts.append(prepared.tokenizer.decode(tokens[:-1]))
        assert prepared.manifest.text_bytes[split] == sum(len(t.encode()) for t in texts[-len(starts) :])
    long = "\n".join(text_of(number) for number in range(1000, 1100))
    numbers = [*(n for n in range(DOCUMENTS) if n != 7), *range(2000, 2005)]
    assert sorted(texts) == sorted([long, *(text_of(number) for number in numbers)])
    assert len(prepared.manifest.shards) > 10, "too few shards to say anything about their seams"
    assert prepared.manifest.documents["validation"] > 10


def test_workers_do_not_change_a_byte(wishes: Wishes, folder: Path, tmp_path: Path) -> None:
    build(wishes, tmp_path / "out", 3, unit_bytes=UNIT_BYTES)
    assert hash_of(tmp_path / "out") == hash_of(folder)


def test_reads_across_shards_are_reads_of_one_row(folder: Path) -> None:
    store = open_prepared(folder).store("train")
    whole, starts = store.read(0, len(store)), store.starts_between(0, len(store))
    for start in range(0, len(store), 997):
        for stop in (start, start + 1, start + 2500, len(store) + 9):
            assert store.read(start, stop).tolist() == whole[start:stop].tolist()
            inside = starts[(starts >= start) & (starts < stop)]
            assert store.starts_between(start, stop).tolist() == inside.tolist()


@pytest.mark.thorough
def test_killed_ten_times_it_ends_as_if_it_never_was(wishes: Wishes, folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Before its first shard, between a shard's tokens and its record, and after one or two records, in turns."""
    from meshwright.data.prepared import shard

    write, out, kept = shard.write_atomic, tmp_path / "out", []

    def finished() -> int:
        return len(list(out.glob(".partial/[0-9]*.json")))

    def prepare_until(shards: int, reached: Path) -> None:
        """In a child: no worker writes another record once so many are finished."""

        def write_or_wait(path: Path, text: str, **how: bool) -> None:
            if finished() >= shards:
                reached.touch()
                time.sleep(3600)  # until it is killed
            write(path, text, **how)

        monkeypatch.setattr(shard, "write_atomic", write_or_wait)
        build(wishes, out, 2, unit_bytes=UNIT_BYTES)

    for turn in range(10):
        reached = tmp_path / f"reached-{turn}"
        child = multiprocessing.get_context("fork").Process(target=prepare_until, args=(turn // 2, reached))
        child.start()
        if turn:  # the first is killed as soon as it has begun
            wait_for_file(reached)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        kept.append(finished())
    assert kept == sorted(kept) and kept[-1] > kept[0], f"finished shards are not kept: {kept}"
    build(wishes, out, 2, unit_bytes=UNIT_BYTES)
    assert hash_of(out) == hash_of(folder)


def test_half_written_shards_are_done_again(wishes: Wishes, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(wishes, out, 1, unit_bytes=UNIT_BYTES)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").unlink()
    partial = out / ".partial"
    (partial / "unit-00003.1").mkdir(parents=True)
    (partial / "plan.json").write_text(f"{manifest['identity']} 2")
    for shard in manifest["shards"][:3]:
        (partial / f"{shard['number']:05d}.json").write_text(json.dumps(shard))
    (out / "train-00003.bin").write_bytes(b"half")
    build(wishes, out, 1, unit_bytes=UNIT_BYTES)
    assert hash_of(out) == hash_of(folder)
    before = (out / "train-00003.bin").stat().st_mtime_ns
    build(wishes, out, 1, unit_bytes=UNIT_BYTES)
    assert (out / "train-00003.bin").stat().st_mtime_ns == before, "a finished folder is left alone"


def test_a_tokenizer_is_trained_where_none_is_given(source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for out, workers in ((first, 1), (second, 2)):
        manifest = build(Wishes((str(source),), vocab_size=300), out, workers, unit_bytes=UNIT_BYTES)
    assert hash_of(first) == hash_of(second)
    assert manifest.vocab_size == 300
    assert " quick " in inspect(first, 1).samples[0].text


def test_inspect_counts_lengths(folder: Path) -> None:
    look = inspect(folder, 3)
    assert sum(count for _, count in look.histogram) == look.manifest.documents["train"]
    store = open_prepared(folder).store("train")
    lengths = np.diff(np.append(store.starts_between(0, len(store)), len(store)))
    assert look.longest == lengths.max()
    for limit, count in look.histogram:
        assert count == ((lengths <= limit) & (lengths > limit // 2)).sum()
    assert len(look.samples) == 3 and all("the" in sample.text for sample in look.samples)


DAMAGES = {
    "changed": (lambda path: path.write_bytes(b"\xff" + path.read_bytes()[1:]), "is not as it was written"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-2]), "bytes where"),
    "gone": (lambda path: path.unlink(), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["train-00002.bin", "validation-00001.documents.npy", "tokenizer.json"])
def test_verify_names_what_is_damaged(wishes: Wishes, folder: Path, tmp_path: Path, damage: str, name: str) -> None:
    import shutil

    assert verify(folder).damages == []
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    DAMAGES[damage][0](copy / name)
    (found,) = verify(copy).damages
    assert name in found
    if name != "tokenizer.json":
        assert DAMAGES[damage][1] in found
    if damage != "changed" or name == "tokenizer.json":
        with pytest.raises(UserError, match="copy"):
            open_prepared(copy)


def test_a_job_trains_on_prepared_folders(folder: Path, wishes: Wishes, tmp_path: Path) -> None:
    corpus = prepare(Data(sources=(str(folder),)), 300)
    assert corpus.train.read(0, 50).tolist() == open_prepared(folder).store("train").read(0, 50).tolist()
    twice = prepare(Data(sources=(str(folder), str(folder))), 300)
    assert len(twice.train) == 2 * len(corpus.train) and len(twice.validation) == 2 * len(corpus.validation)


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(folder: Path, wishes: Wishes, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    train_tokenizer(["quite other words, and other merges then"] * 9, 290).save(other)
    with pytest.raises(UserError, match=r"data\.tokenizer = .*other\.json is not the one .* was prepared with"):
        prepare(Data(sources=(str(folder),), tokenizer=str(other)), 300)
    prepare(Data(sources=(str(folder),), tokenizer=str(wishes.tokenizer)), 300)
    with pytest.raises(UserError, match=r"model\.vocab_size = 299 is smaller than the 300 entries"):
        prepare(Data(sources=(str(folder),)), 299)
    build(Wishes(wishes.sources, other), tmp_path / "otherwise", 1)
    with pytest.raises(UserError, match=r"was prepared with another tokenizer than"):
        prepare(Data(sources=(str(folder), str(tmp_path / "otherwise"))), 300)
    with pytest.raises(UserError, match="mixes prepared folders with builtin:stdlib"):
        prepare(Data(sources=(str(folder), "builtin:stdlib")), 300)


def test_a_worker_that_is_killed_is_told(wishes: Wishes, tmp_path: Path, monkeypatch) -> None:
    from meshwright.data.prepared import workers

    monkeypatch.setattr(workers, "make_shard", lambda *ignored: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(
        UserError,
        match=r"a worker process was killed at one of .*\.jsonl.*, perhaps for lack .* fewer --workers",
    ):
        build(wishes, tmp_path / "out", 1, unit_bytes=UNIT_BYTES)
    assert not (tmp_path / "out").exists()
