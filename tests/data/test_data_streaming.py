"""Streaming gives one global sequence of samples, whatever the ranks, workers and interruptions."""

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_texts import text_of
from waiting import SlowWorker

from meshwright.data import StreamLoader, WorkerDied, open_flow
from meshwright.data.raw import reading
from meshwright.data.streaming import shard
from meshwright.data.tokenizer import train_tokenizer
from meshwright.errors import UserError
from meshwright.job.data import Data

DOCUMENTS, LENGTH, BATCH = 300, 16, 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("stream")
    for part in range(10):
        lines = [json.dumps({"text": text_of(part * 30 + n, 20)}) for n in range(30)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    train_tokenizer([text_of(number) for number in range(50)], 300).save(folder / "tokenizer.json")
    return Data(
        sources=tuple(str(folder / f"{part}.jsonl") for part in range(10)),
        tokenizer=str(folder / "tokenizer.json"),
        stream=True,
        virtual_shards=6,
        shuffle_buffer=5,
        validation_fraction=0.1,
    )


@pytest.fixture(scope="module")
def flow(data: Data):
    from meshwright.data.streaming import flow as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SMALLEST_UNIT_BYTES", 1000)
        return open_flow(data, 300)


def loader(flow, **more) -> StreamLoader:
    return StreamLoader(flow, seed=7, sequence_length=LENGTH, global_batch=BATCH, **more)


def samples(flow, steps: int, ranks: int = 1, workers: int = 0, position: int = 0, cursors=None):
    """The samples of some steps by number, and the position and cursors behind them."""
    found, kept, after = {}, {}, position
    for rank in range(ranks):
        one = loader(flow, position=position, cursors=cursors, rank=rank, ranks=ranks, workers=workers)
        for _ in range(steps):
            batch = next(one).batch
            assert batch.sample_ids_B.tolist() == sorted(batch.sample_ids_B.tolist()), "micro-batches would differ"
            for number, tokens, labels in zip(
                batch.sample_ids_B.tolist(), batch.tokens_BS, batch.labels_BS, strict=True
            ):
                assert number not in found, "two ranks read the same sample"
                found[number] = (tokens.tolist(), labels.tolist())
        kept |= one.own_cursors()
        after = one.position
        one.close()
    return found, after, kept


@pytest.fixture(scope="module")
def straight(flow):
    return samples(flow, 24)[0]


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (3, 1), (4, 0), (8, 0), (2, 2)])
def test_ranks_and_workers_change_nothing(flow, straight, ranks: int, workers: int) -> None:
    found, after, _ = samples(flow, 3, ranks, workers)
    assert found == {number: straight[number] for number in range(3 * BATCH)} and after == 3 * BATCH


def test_interruptions_that_change_ranks_and_workers_change_nothing(flow, straight) -> None:
    chance = random.Random(5)
    found, position, cursors = {}, 0, None
    for _ in range(10):
        ranks, workers = chance.choice([1, 2, 3, 4, 8]), chance.choice([0, 0, 0, 0, 1])
        more, position, cursors = samples(flow, chance.choice([1, 2, 3]), ranks, workers, position, cursors)
        found |= more
    assert found == {number: straight[number] for number in range(position)} and position > 10 * BATCH


def test_every_training_document_comes_once_a_round_and_held_out_ones_never(flow) -> None:
    assert len(flow.units) > flow.shards == 6
    held_out = flow.held_out(10**9)
    pieces = np.split(held_out.read(0, len(held_out)), held_out.starts_between(1, len(held_out)))
    kept = {flow.tokenizer.decode(piece[:-1].tolist()) for piece in pieces}
    everything = {text_of(number, 20) for number in range(DOCUMENTS)}
    assert 10 < len(kept) < 60 and kept < everything
    seen: list[str] = []
    for number in range(flow.shards):
        one = flow.shard(number, LENGTH, 7)
        for item in one._read_on(shard.START):
            if item.turn == len(one._units):
                break
            seen.append(flow.tokenizer.decode(item.tokens[:-1].tolist()))
    assert sorted(seen) == sorted(everything - kept)


def test_samples_are_shuffled_and_each_round_in_another_order(flow, straight) -> None:
    other = StreamLoader(flow, seed=8, sequence_length=LENGTH, global_batch=BATCH)
    assert next(other).batch.tokens_BS.tolist() != [straight[number][0] for number in range(BATCH)]
    one = flow.shard(0, LENGTH, 7)
    rounds = [
        [one.unit_at(turn).number for turn in range(r * len(one._units), (r + 1) * len(one._units))] for r in range(4)
    ]
    assert len({tuple(order) for order in rounds}) > 1 and len({tuple(sorted(order)) for order in rounds}) == 1


def test_labels_are_the_next_tokens_and_documents_are_masked(flow, data: Data) -> None:
    from dataclasses import replace

    plain = next(loader(flow))
    assert plain.valid_count == BATCH * LENGTH
    masked = next(loader(replace(flow, mask_documents=True)))
    batch = masked.batch
    assert batch.tokens_BS.tolist() == plain.batch.tokens_BS.tolist()
    ends = batch.tokens_BS == flow.tokenizer.end_of_text
    assert ends.any() and (batch.labels_BS[ends] == -100).all() and masked.valid_count == BATCH * LENGTH - ends.sum()
    assert (batch.labels_BS[~ends] == plain.batch.labels_BS[~ends]).all()
    assert (batch.positions_BS[:, 1:][ends[:, :-1]] == 0).all()


def test_resuming_reads_no_unit_before_the_cursor(flow, monkeypatch) -> None:
    _, position, cursors = samples(flow, 20)
    opened: list[int] = []
    read = reading.read_unit
    monkeypatch.setattr(shard, "read_unit", lambda unit, *a, **k: opened.append(unit.number) or read(unit, *a, **k))
    next(loader(flow, position=position, cursors=cursors))
    begins = {flow.shard(number, LENGTH, 7).unit_at(cursor.turn).number for number, cursor in cursors.items()}
    assert min(cursor.turn for cursor in cursors.values()) > 1 and set(opened[:1]) <= begins
    assert len(opened) < 4 * flow.shards


def test_a_stream_that_cannot_be_read_is_refused(data: Data, tmp_path: Path, flow) -> None:
    with pytest.raises(UserError, match="without the cursor of shard 0"):
        loader(flow, position=5)
    (tmp_path / "bad.jsonl").write_text('{"body": "x"}\n' * 2000)
    with pytest.raises(UserError, match=r"of the last 1000 documents cannot be used \(1000 wrong field, first at"):
        next(loader(open_flow(data.model_copy(update={"sources": (str(tmp_path / "bad.jsonl"),)}), 300)))
    (tmp_path / "few.jsonl").write_text('{"body": "x"}\n' * 9)
    for workers in (0, 1):
        with pytest.raises(UserError, match=r"few\.jsonl hold no text to train on"):
            next(
                loader(
                    open_flow(data.model_copy(update={"sources": (str(tmp_path / "few.jsonl"),)}), 300), workers=workers
                )
            )
    with pytest.raises(UserError, match=r"has 300 entries but model\.vocab_size = 299"):
        open_flow(data, 299)
    for fields in ({"packing": "best-fit"}, {"join": "id"}, {"format": "conversations"}):
        with pytest.raises(ValueError, match=r"data\.stream = true reads plain text sequentially"):
            Data(stream=True, **fields)


@pytest.mark.thorough
def test_a_run_that_streams_resumes_exactly(cli, tiny_job: Path) -> None:
    common = ["--set", "data.stream=true", "--set", "data.shuffle_buffer=3", "--set", "schedule.name=constant"]
    common += ["--set", "schedule.warmup_steps=0"]
    assert cli("train", "job.toml", *common, "--set", "run.folder=straight", "--set", "run.steps=6").code == 0
    first = cli("train", "job.toml", *common, "--set", "run.steps=3")
    assert first.code == 0 and "streamed from" in first.out + first.err, first
    second = cli("train", "job.toml", "--resume", *common, "--set", "run.steps=6")
    assert second.code == 0, second.err

    def losses(run: str) -> list[float]:
        rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    assert losses("run") == losses("straight") and len(losses("run")) == 6
    Path("corpus/module_00.py").write_text("another text")
    refused = cli("train", "job.toml", "--resume", *common, "--set", "run.steps=9")
    assert refused.code == 2 and "data.sources" in refused.err


@pytest.fixture
def hindered(monkeypatch):
    """Calls something in the worker that reads the fifth sample of virtual shard 1, which is the second step's."""

    def hinder(act) -> None:
        read = shard.VirtualShard.read

        def hindered_read(self, sample: int):
            if (self._number, sample) == (1, 4):
                act()
            return read(self, sample)

        monkeypatch.setattr(shard.VirtualShard, "read", hindered_read)

    return hinder


def test_a_slow_worker_is_named_while_training_waits(flow, hindered, monkeypatch, tmp_path) -> None:
    worker = SlowWorker(tmp_path, monkeypatch, 0.3, sample=24)
    hindered(worker.read)
    steps = loader(flow, workers=2, prefetch=1)
    steps.readers.on_slow = worker.report
    next(steps), next(steps)
    steps.close()
    [sentence] = worker.sentences
    assert re.fullmatch(
        r"training has waited 0\.3 s for data worker 1 of 2 \(process \d+, reading the step of sample 24\)", sentence
    )


def test_a_dead_worker_is_named(flow, hindered) -> None:
    hindered(lambda: os.kill(os.getpid(), signal.SIGKILL))
    one = loader(flow, workers=2, prefetch=1)
    with pytest.raises(WorkerDied, match=r"data worker 1 of 2 \(process \d+, reading the step of sample 24\) failed"):
        next(one), next(one)
    assert multiprocessing.active_children() == []


def test_a_worker_heeds_no_sigterm_but_its_parents(flow) -> None:
    """A scheduler that ends a job signals every process of it, and the run must still finish its step and save."""
    one = loader(flow, workers=1, prefetch=1)
    next(one)
    [worker] = multiprocessing.active_children()
    stranger = f"import os; os.kill({worker.pid}, {int(signal.SIGTERM)})"
    subprocess.run([sys.executable, "-S", "-c", stranger], check=True)
    for _ in range(3):
        next(one)
    assert worker.is_alive()
    worker.terminate()
    worker.join(5)
    assert worker.exitcode == 0
    one.close()
