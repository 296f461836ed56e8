"""One stream whatever reads it: ranks, workers and micro-batches only decide who reads which sample."""

import hashlib
import itertools
from collections import Counter
from pathlib import Path

import pytest
from counting import counted_calls
from data_texts import text_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.data import Corpus, Loader, Stream, prepare, training_stream
from meshwright.errors import UserError
from meshwright.job.data import Data, Stage

S = 24
GLOBAL = 24
RANKS, WORKERS, MICRO = (1, 2, 3, 4, 8), (0, 1, 4), (1, 2, 3, 4)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Data]:
    """Three sources of unequal size and documents of unequal length, prepared once."""
    folder = tmp_path_factory.mktemp("mixed")
    for name, documents in (("web", 30), ("code", 12), ("books", 5)):
        (folder / name).mkdir()
        for number in range(documents):
            (folder / name / f"{number:02}.txt").write_text(name + text_of(number, words=5 + 7 * number % 30))
    data = Data(
        sources=tuple(str(folder / name) for name in ("web", "code", "books")),
        weights=(0.7, 0.2, 0.1),
        stages=(Stage(tokens=1000, weights=(0.2, 0.3, 0.5)),),
        cache=str(folder / "cache"),
        mask_documents=True,
        packing="best-fit",
    )
    return prepare(data, 300), data


@pytest.fixture(scope="module")
def stream(mixed: tuple[Corpus, Data]) -> Stream:
    return training_stream(*mixed, S, seed=3)


def read_steps(stream: Stream, ranks: int, workers: int, position: int, steps: int) -> list[list]:
    """The batches of some steps, in each a batch for every rank."""
    loaders = [
        Loader(stream, global_batch=GLOBAL, position=position, workers=workers, prefetch=1, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    try:
        return [[next(loader).batch for loader in loaders] for _ in range(steps)]
    finally:
        for loader in loaders:
            loader.close()


def feed(digest, steps: list[list], micro_batch: int) -> None:
    """Hash the samples in global order as the micro-batches bring them."""
    for batches in steps:
        for batch in batches:
            for micro in batch.split(micro_batch):
                for row in range(len(micro)):
                    for tensor in (micro.sample_ids_B[row : row + 1], micro.tokens_BS[row], micro.labels_BS[row]):
                        digest.update(tensor.numpy().tobytes())
                    for tensor in (micro.positions_BS[row], micro.document_ids_BS[row]):
                        digest.update(tensor.numpy().tobytes())


def hash_of(steps: list[list], micro_batch: int) -> str:
    digest = hashlib.sha256()
    feed(digest, steps, micro_batch)
    return digest.hexdigest()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_stream_is_one_for_all_ranks_workers_and_micro_batches(stream: Stream):
    reference = hash_of(read_steps(stream, 1, 0, 0, 3), 1)
    for ranks, workers in itertools.product(RANKS, WORKERS):
        steps = read_steps(stream, ranks, workers, 0, 3)
        for micro_batch in MICRO:
            assert hash_of(steps, micro_batch) == reference, (ranks, workers, micro_batch)
    assert hash_of(read_steps(stream, 1, 0, GLOBAL, 3), 1) != reference


leg = st.tuples(st.sampled_from(RANKS), st.just(0), st.sampled_from(MICRO), st.integers(1, 3))
WITH_WORKERS = [(1, 4, 1, 1), (2, 0, 3, 2), (1, 1, 4, 1), (3, 1, 2, 1), (8, 0, 1, 1), (1, 0, 2, 3), (2, 1, 1, 1)]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@settings(max_examples=10, deadline=None)
@given(st.lists(leg, min_size=11, max_size=11))
@example([*WITH_WORKERS, (4, 0, 2, 1), (1, 1, 3, 2), (3, 0, 4, 1), (2, 4, 2, 2)])
def test_ten_interruptions_change_nothing(stream: Stream, legs: list[tuple[int, int, int, int]]):
    position, digest = 0, hashlib.sha256()
    for ranks, workers, micro_batch, steps in legs:
        feed(digest, read_steps(stream, ranks, workers, position, steps), micro_batch)
        position += steps * GLOBAL
    assert digest.hexdigest() == hash_of(read_steps(stream, 1, 0, 0, position // GLOBAL), 1)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**63), st.integers(0, 10**12))
def test_every_part_is_gone_through_in_epochs_of_its_own(mixed: tuple[Corpus, Data], seed: int, far: int):
    stream = training_stream(*mixed, S, seed)
    seen = Counter(stream.place(sample) for sample in range(400))
    epochs = stream.epochs(400)
    for part, windows in enumerate(stream.parts):
        counts = [seen[part, window] for window in range(len(windows))]
        assert sum(counts) / len(windows) == pytest.approx(epochs[part])
        assert max(counts) - min(counts) <= 1  # none comes again before all have come
    assert stream.place(far) == stream.place(far)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 500), st.integers(1, 70), st.integers(0, 2**64))
def test_groups_of_neighbours_stay_together_in_every_epoch(windows: int, group: int, seed: int):
    from meshwright.data.order import window_of

    for epoch in (0, 3):
        order = [window_of(epoch * windows + index, windows, seed, group) for index in range(windows)]
        assert sorted(order) == list(range(windows))
        for first in range(0, windows, group):
            together = order[first : first + group]
            assert max(together) - min(together) == len(together) - 1


def test_a_run_resumes_at_sample_10_to_the_12_at_once(mixed: tuple[Corpus, Data]):
    with counted_calls() as calls:
        stream = training_stream(*mixed, S, seed=3)
        step = next(Loader(stream, global_batch=GLOBAL, position=10**12))
    assert calls.count < 200_000, calls
    assert step.batch.sample_ids_B.tolist() == list(range(10**12, 10**12 + GLOBAL))
    reread = [stream.read(sample).tokens_S.tolist() for sample in range(10**12, 10**12 + GLOBAL)]
    assert step.batch.tokens_BS.tolist() == reread


def test_weights_decide_the_source_of_each_sample(mixed: tuple[Corpus, Data]):
    corpus, data = mixed
    stream = training_stream(corpus, data, S, seed=3)
    web, code, books = (
        {tuple(windows.read(window).tokens_S.tolist()) for window in range(len(windows))} for windows in stream.parts
    )
    assert not web & books
    first = 1000 // S + 1  # the first sample of which no token was among the first thousand
    before = [tuple(stream.read(sample).tokens_S.tolist()) for sample in range(40)]
    after = [tuple(stream.read(sample).tokens_S.tolist()) for sample in range(first, first + 40)]
    for samples, shares in ((before, (28, 8, 4)), (after, (8, 12, 20))):
        for part, share in zip((web, code, books), shares, strict=True):
            assert abs(sum(sample in part for sample in samples) - share) < 2


def test_a_source_without_one_sequence_is_named(tmp_path: Path):
    (tmp_path / "long.txt").write_text(text_of(1, words=400))
    (tmp_path / "short.txt").write_text("few words")
    sources = tuple(str(tmp_path / name) for name in ("long.txt", "short.txt"))
    data = Data(sources=sources, cache=str(tmp_path / "cache"), weights=(1, 1))
    corpus = prepare(data, 300)
    with pytest.raises(UserError, match=r"data\.sources: .*/short\.txt holds \d+ training tokens, too few for one"):
        training_stream(corpus, data, S, seed=0)
    # Nobody asks for it: fine.
    assert len(training_stream(corpus, data.model_copy(update={"weights": (1, 0)}), S, seed=0).parts) == 2
