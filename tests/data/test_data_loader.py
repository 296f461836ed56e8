"""Samples and the loader: one stream, whatever reads it."""

import gc
import itertools
import multiprocessing
import os
import re
import shutil
import signal

import numpy as np
import pytest
import torch
from waiting import SlowWorker

from meshwright.data import (
    IGNORE,
    Batch,
    Loader,
    RunningWindows,
    Step,
    Stream,
    WorkerDied,
    prepare,
    readers,
    training_stream,
    validation_batches,
    validation_windows,
)
from meshwright.data.batch import stack_samples
from meshwright.errors import UserError
from meshwright.job.data import Data

S = 32


def stream_of(store, seed=5, mask_documents=True) -> Stream:
    return Stream([RunningWindows(store, S, mask_documents)], seed)


def loader_of(store, mask_documents=True, **changes) -> Loader:
    return Loader(stream_of(store, mask_documents=mask_documents), **{"global_batch": 4, **changes})


def take(loader: Loader, steps: int) -> list[Batch]:
    return [step.batch for step in take_steps(loader, steps)]


def take_steps(loader: Loader, steps: int) -> list[Step]:
    try:
        return list(itertools.islice(loader, steps))
    finally:
        loader.close()


def assert_same(a: Batch, b: Batch) -> None:
    assert torch.equal(a.tokens_BS, b.tokens_BS)
    assert torch.equal(a.labels_BS, b.labels_BS)
    assert torch.equal(a.sample_ids_B, b.sample_ids_B)
    assert torch.equal(a.positions_BS, b.positions_BS)
    assert torch.equal(a.document_ids_BS, b.document_ids_BS)
    assert a.valid_counts == b.valid_counts


def test_a_sample_depends_on_seed_and_number_alone(corpus):
    stream = stream_of(corpus.train)
    alone = stream.read(1234)
    for other in (0, 77, 1233):
        stream.read(other)
    again = stream.read(1234)
    assert np.array_equal(alone.tokens_S, again.tokens_S)
    assert alone.tokens_S.dtype == np.int64
    assert not np.array_equal(alone.tokens_S, stream_of(corpus.train, seed=6).read(1234).tokens_S)


def test_windows_cover_the_store_and_labels_are_the_next_token(corpus):
    running = RunningWindows(corpus.train, S)
    count = len(running)
    windows = [running.read(window) for window in range(count)]
    everything = corpus.train.read(0, count * S + 1)
    assert np.array_equal(np.concatenate([window.tokens_S for window in windows]), everything[:-1])
    assert np.array_equal(np.concatenate([window.labels_S for window in windows]), everything[1:])
    assert windows[0].positions_S is None


def test_masked_documents_follow_the_end_of_text(corpus):
    end = corpus.tokenizer.end_of_text
    boundaries = 0
    windows = RunningWindows(corpus.train, S, mask_documents=True)
    whole = stack_samples([windows.read(window) for window in range(len(windows))], list(range(len(windows))))
    for window in range(len(windows)):
        sample = windows.read(window)
        document_ids = whole.document_ids_BS[window]
        assert torch.equal(whole.positions_BS[window], torch.from_numpy(sample.positions_S))
        assert whole.document_counts[window] == document_ids[-1] + 1
        document = position = 0
        for place in range(S):
            assert (document_ids[place], sample.positions_S[place]) == (document, position)
            if sample.tokens_S[place] == end:
                assert sample.labels_S[place] == IGNORE
                document, position, boundaries = document + 1, 0, boundaries + 1
            else:
                assert sample.labels_S[place] == corpus.train.read(window * S + place + 1, window * S + place + 2)[0]
                position += 1
    assert boundaries > 10


def test_the_stream_is_the_same_for_any_number_of_workers(corpus):
    # Long enough to pass into the second epoch.
    steps = len(RunningWindows(corpus.train, S)) // 4 + 5
    reference = take(loader_of(corpus.train), steps)
    assert [batch.sample_ids_B.tolist() for batch in reference[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for workers in (1, 2):
        for expected, batch in zip(reference, take(loader_of(corpus.train, workers=workers), steps), strict=True):
            assert_same(expected, batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_at_any_position(corpus, workers):
    reference = take(loader_of(corpus.train), 12)
    loader = loader_of(corpus.train, workers=workers)
    assert loader.position == 0
    take(loader, 3)
    # Read-ahead does not count: the position is that of the next step handed out.
    assert loader.position == 12
    for expected, batch in zip(reference[3:6], take(loader, 3), strict=True):
        assert_same(expected, batch)
    # A position need not be a multiple of the step: the step's size may have changed.
    odd = take(loader_of(corpus.train, position=5, workers=workers, global_batch=3), 2)
    samples = torch.cat([batch.tokens_BS for batch in reference])
    assert torch.equal(torch.cat([batch.tokens_BS for batch in odd]), samples[5:11])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_share_every_step_and_know_its_whole_count(corpus, ranks: int, masked: bool, workers: int):
    windows = len(RunningWindows(corpus.train, S))
    # Two steps before the end of the second epoch, and some of the third.
    settings = {"global_batch": 6, "mask_documents": masked, "position": 2 * windows - 12}
    whole = take_steps(loader_of(corpus.train, **settings), 5)
    parts = [
        take_steps(loader_of(corpus.train, rank=rank, ranks=ranks, workers=workers, **settings), 5)
        for rank in range(ranks)
    ]
    for number, step in enumerate(whole):
        mine = [part[number] for part in parts]
        assert torch.equal(torch.cat([part.batch.tokens_BS for part in mine]), step.batch.tokens_BS)
        assert torch.equal(torch.cat([part.batch.sample_ids_B for part in mine]), step.batch.sample_ids_B)
        assert {part.valid_count for part in mine} == {step.valid_count} == {step.batch.valid_count()}
        assert {part.tokens for part in mine} == {step.tokens} == {6 * S}
    shares = [{part[number].batch.valid_count() for part in parts} for number in range(5)]
    assert any(len(counts) > 1 for counts in shares) == masked  # unequal shares, or this would prove little


def test_valid_counts_survive_splitting_and_copying(corpus):
    (batch,) = take(loader_of(corpus.train, global_batch=10), 1)
    count = int((batch.labels_BS != IGNORE).sum())
    assert count < 10 * S
    assert batch.valid_count() == batch.to("meta").valid_count() == count
    parts = batch.split(4)
    assert [len(part) for part in parts] == [4, 4, 2]
    assert [part.valid_count() for part in parts] == [int((part.labels_BS != IGNORE).sum()) for part in parts]
    assert torch.equal(torch.cat([part.document_ids_BS for part in parts]), batch.document_ids_BS)
    assert torch.equal(torch.cat([part.sample_ids_B for part in parts]), batch.sample_ids_B)


def test_the_loader_leaves_the_global_random_state_alone(corpus):
    before = torch.get_rng_state()
    for workers in (0, 1):
        take(loader_of(corpus.train, workers=workers), 2)
    assert torch.equal(before, torch.get_rng_state())


def test_close_ends_the_workers(corpus):
    loader = loader_of(corpus.train, workers=2)
    next(loader)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert multiprocessing.active_children() == []


def test_workers_leave_signals_to_the_main_process(corpus):
    loader = loader_of(corpus.train, workers=2, prefetch=1)
    # One step from each worker, so that both have started.
    next(loader), next(loader)
    for worker in multiprocessing.active_children():
        assert os.getpgid(worker.pid) != os.getpgid(0)
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGUSR1)
    assert len(take(loader, 10)) == 10


class Deadly(RunningWindows):
    """Windows of which one in the second step ends who reads it."""

    def read(self, window):
        if window == stream_of(self.store).place(5)[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(window)


def test_a_dead_worker_is_named(corpus):
    loader = Loader(Stream([Deadly(corpus.train, S, True)], 5), global_batch=4, workers=2, prefetch=1)
    gc.disable()  # the death may be told anywhere in this process, also amid a collection, where nobody would hear it
    told = ""
    try:
        take(loader, 10)
    except RuntimeError as error:
        told = str(error if "data worker" in str(error) else loader.readers.explained(error))
    finally:
        gc.enable()
    assert re.match(
        r"data worker 1 of 2 \(process \d+, reading the step of sample 4\) failed \(DataLoader worker", told
    )
    assert told.endswith("try fewer data.workers, or data.workers = 0")
    assert multiprocessing.active_children() == []


class Failing(RunningWindows):
    """Windows of which one in the second step cannot be read."""

    def read(self, window):
        if window == stream_of(self.store).place(5)[1]:
            raise OSError(5, "Input/output error")
        return super().read(window)


def test_a_worker_that_raises_is_named_and_the_rest_ended(corpus):
    loader = Loader(Stream([Failing(corpus.train, S, True)], 5), global_batch=4, workers=2, prefetch=1)
    with pytest.raises(
        WorkerDied,
        match=r"^data worker 1 of 2 \(process \d+, reading the step of sample 4\) failed at the tokens of data\.sources"
        r" \(OSError: .*Input/output error\); fix that, or try data\.workers = 0, and continue with --resume",
    ):
        take(loader, 10)
    assert multiprocessing.active_children() == []


class Stuck(RunningWindows):
    """Windows of which one in the second step never comes."""

    def read(self, window):
        if window == stream_of(self.store).place(5)[1]:
            signal.pause()
        return super().read(window)


def test_a_worker_that_never_answers_is_given_up(corpus, monkeypatch):
    monkeypatch.setattr(readers, "STUCK_S", 0.5)
    loader = Loader(Stream([Stuck(corpus.train, S, True)], 5), global_batch=4, workers=2, prefetch=1)
    with pytest.raises(
        WorkerDied, match=r"^data worker . of 2 .* gave nothing for 0\.5 s; see what keeps it .*--resume"
    ):
        take(loader, 10)


class Slow(RunningWindows):
    """Windows of which the second step's second one is late."""

    worker: SlowWorker

    def read(self, window):
        if window == stream_of(self.store).place(5)[1]:
            self.worker.read()
        return super().read(window)


def test_a_slow_worker_is_named_while_training_waits(corpus, monkeypatch, tmp_path):
    windows = Slow(corpus.train, S, True)
    windows.worker = SlowWorker(tmp_path, monkeypatch, 0.3, sample=4)
    loader = Loader(Stream([windows], 5), global_batch=4, workers=2, prefetch=1)
    loader.readers.on_slow = windows.worker.report
    take(loader, 4)
    [sentence] = windows.worker.sentences
    assert re.fullmatch(
        r"training has waited 0\.3 s for data worker 1 of 2 \(process \d+, reading the step of sample 4\)", sentence
    )


@pytest.mark.parametrize("error", [EOFError, ConnectionRefusedError])
def test_a_worker_that_dies_while_it_hands_over_is_the_same_error(corpus, monkeypatch, error):
    def torn(self, timeout=0.0):
        raise error()

    loader = loader_of(corpus.train, workers=1, prefetch=1)
    next(loader)
    monkeypatch.setattr(type(loader.readers._iterator), "_try_get_data", torn)
    with pytest.raises(RuntimeError, match=r"data\.workers = 1 data worker processes failed"):
        next(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_tokens_that_vanish_are_named(corpus, tmp_path, workers):
    source = tmp_path / "a.txt"
    source.write_text("words " * 500)
    gone = prepare(Data(sources=(str(source),), cache=str(tmp_path / "cache")), 300)
    shutil.rmtree(gone.folder)
    with pytest.raises(UserError, match=r"^data\.cache: .*train-00000\.bin is gone, damaged .*start again$"):
        next(loader_of(gone.train, workers=workers))
    assert multiprocessing.active_children() == []


def test_too_little_text_for_one_sequence(corpus):
    tokens = len(corpus.train)
    with pytest.raises(
        UserError,
        match=rf"data\.sources hold {tokens} training tokens, .* batch\.sequence_length = {tokens}, which takes",
    ):
        training_stream(corpus, Data(), tokens, seed=0)
    assert len(training_stream(corpus, Data(), tokens - 1, seed=0).parts[0]) == 1


def test_validation_is_in_order_and_of_one_shape(corpus):
    windows = len(RunningWindows(corpus.validation, S))
    assert windows % 4
    batches = list(validation_batches(RunningWindows(corpus.validation, S), 4, 10**6))
    tokens = torch.cat([batch.tokens_BS for batch in batches])
    assert tokens.shape == (-(-windows // 4) * 4, S)
    assert tokens[:windows].flatten().tolist() == corpus.validation.read(0, windows * S).tolist()
    assert torch.cat([batch.sample_ids_B for batch in batches]).tolist()[windows - 1 :] == [
        windows - 1,
        *[-1] * (-windows % 4),
    ]
    assert sum(batch.valid_count() for batch in batches) == windows * S
    first = list(validation_batches(RunningWindows(corpus.validation, S, mask_documents=True), 4, 8))
    assert [batch.sample_ids_B.tolist() for batch in first] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_too_little_text_for_validation(corpus):
    with pytest.raises(UserError, match=r"data\.validation_fraction leaves \d+ tokens .*; raise it or add text"):
        validation_windows(corpus, Data(), len(corpus.validation))


@pytest.mark.gpu
def test_pinned_batches_copy_to_the_gpu(corpus):
    (batch,) = take(loader_of(corpus.train, workers=1, pin_memory=True), 1)
    assert batch.tokens_BS.is_pinned() and batch.document_ids_BS.is_pinned()
    copied = batch.to("cuda")
    torch.cuda.synchronize()
    assert_same(batch, copied.to("cpu", non_blocking=False))
