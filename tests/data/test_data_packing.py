"""Best-fit packing: whole documents in fixed windows, every token once, and what either packing costs."""

from pathlib import Path

import numpy as np
import pytest
from data_texts import text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import IGNORE, Loader, RunningWindows, prepare, training_index, training_stream
from meshwright.data.batch import stack_samples
from meshwright.data.packed import PackedWindows, open_packed
from meshwright.data.packing import pack_documents, packed_shares, running_shares
from meshwright.errors import UserError
from meshwright.job.data import Data


class Documents:
    """Documents of given lengths; a token's value says where it lies, every third token is no target."""

    def __init__(self, lengths: list[int], some_targets: bool = False) -> None:
        self.starts = np.cumsum([0, *lengths[:-1]])
        self._count, self._some = sum(lengths), some_targets

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int):
        return np.arange(start, min(stop, self._count))

    def starts_between(self, start: int, stop: int):
        return self.starts[(self.starts >= start) & (self.starts < stop)]

    def targets(self, start: int, stop: int):
        return np.arange(start, min(stop, self._count)) % 3 > 0 if self._some else None


def naive_best_fit(lengths: list[int], room: int) -> int:
    """How many windows textbook best-fit-decreasing takes, a piece at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [left for left in rooms if left >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(room - length)
    return len(rooms)


lengths_and_room = st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 40))


@settings(deadline=None, max_examples=150)
@given(lengths_and_room)
def test_packing_is_textbook_best_fit_and_loses_nothing(drawn: tuple[list[int], int]):
    lengths, room = drawn
    store = Documents(lengths)
    packed = pack_documents(store.starts, len(store), room)
    pieces = [length for each in lengths for length in [room] * (each // room) + [each % room] * (each % room > 0)]
    assert sorted(packed.lengths_P.tolist()) == sorted(pieces)
    assert len(packed.first_W) - 1 == naive_best_fit(pieces, room)
    tokens = np.concatenate([np.arange(a, a + n) for a, n in zip(packed.starts_P, packed.lengths_P, strict=True)])
    assert sorted(tokens.tolist()) == list(range(len(store)))
    assert all(part.sum() <= room for part in np.split(packed.lengths_P, packed.first_W[1:-1]))
    shares = packed_shares(packed, store.starts, len(store), room)
    assert shares.padded == pytest.approx(1 - len(store) / (room * (len(packed.first_W) - 1)))
    assert shares.truncated == pytest.approx(sum(max(0, each - room) for each in lengths) / len(store))
    running = running_shares(store.starts, len(store), room)
    cut_off = sum(token // room != start // room for start, n in zip(store.starts, lengths, strict=True)
                  for token in range(start, start + n))  # fmt: skip
    assert running.truncated == pytest.approx(cut_off / len(store)) and running.padded == 0
    assert shares.truncated <= running.truncated + 1e-12


@pytest.mark.thorough
@settings(deadline=None, max_examples=80)
@given(lengths_and_room, st.booleans(), st.booleans(), st.sampled_from(["best-fit", "none"]))
def test_labels_stay_in_their_document(drawn: tuple[list[int], int], masked: bool, some: bool, packing: str):
    lengths, room = drawn
    store = Documents(lengths, some)
    index = open_packed(store, (0, len(store)), packing, room, None, "train")
    windows = PackedWindows(store, index, room, masked)
    for window in range(len(windows)):
        sample = windows.read(window)
        document_ids = stack_samples([sample], [0]).document_ids_BS
        assert windows.count_valid(window) == int((sample.labels_S != IGNORE).sum())
        assert windows.length(window) == sample.length
        for place, (token, label) in enumerate(zip(sample.tokens_S, sample.labels_S, strict=True)):
            if place >= sample.length:
                assert label == IGNORE
                continue
            document = int(np.searchsorted(store.starts, token, side="right"))
            follows = token + 1 < len(store) and token + 1 not in store.starts
            next_piece = not follows and place + 1 < sample.length and not masked
            expected = token + 1 if follows else sample.tokens_S[place + 1] if next_piece else IGNORE
            if expected != IGNORE and some and expected % 3 == 0:
                expected = IGNORE
            assert label == expected
            if masked:
                cut = place and sample.tokens_S[place - 1] == token - 1 and token not in store.starts
                assert sample.positions_S[place] == (sample.positions_S[place - 1] + 1 if cut else 0)
                same = np.searchsorted(store.starts, sample.tokens_S[: sample.length], side="right") == document
                numbers = document_ids[0, : sample.length].numpy()
                assert np.array_equal(numbers[same], np.full(same.sum(), numbers[place]))
                assert document_ids[0, sample.length :].tolist() == [numbers[-1] + 1] * (room - sample.length)


@settings(deadline=None, max_examples=40)
@given(lengths_and_room, st.booleans())
def test_running_text_counts_its_targets(drawn: tuple[list[int], int], masked: bool):
    windows = RunningWindows(Documents(drawn[0], some_targets=True), drawn[1], masked)
    for window in range(len(windows)):
        sample = windows.read(window)
        assert windows.count_valid(window) == int((sample.labels_S != IGNORE).sum())
        assert not (sample.labels_S[sample.labels_S != IGNORE] % 3 == 0).any()


@pytest.fixture
def texts(tmp_path: Path) -> Data:
    lines = [text_of(number, words=3 + number * 5 % 40) for number in range(80)]
    (tmp_path / "texts").mkdir()
    for number, line in enumerate(lines):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(line)
    return Data(sources=(str(tmp_path / "texts"),), cache=str(tmp_path / "cache"), packing="best-fit")


def test_the_index_is_kept_and_a_damaged_one_made_anew(texts: Data):
    corpus = prepare(texts, 300)
    made = training_index(corpus, texts, 64)
    assert made.shares.truncated <= made.running.truncated and made.shares.padded < 0.1
    kept = sorted(corpus.folder.glob("train.best-fit-64-*"))
    assert len(kept) == 4
    written = {path: path.stat().st_mtime_ns for path in kept}
    again = training_index(corpus, texts, 64)
    assert np.array_equal(again.packed.first_W, made.packed.first_W) and again.shares == made.shares
    assert {path: path.stat().st_mtime_ns for path in kept} == written
    np.save(next(path for path in kept if path.name.endswith("first.npy")), np.zeros(1, np.int64))
    assert np.array_equal(training_index(corpus, texts, 64).packed.first_W, made.packed.first_W)


def test_without_packing_batches_hold_documents_of_like_length(texts: Data):
    alone = texts.model_copy(update={"packing": "none"})
    stream = training_stream(prepare(texts, 300), alone, 64, seed=1)
    step = next(Loader(stream, global_batch=64))
    lengths = step.batch.lengths
    assert step.tokens == sum(lengths) and step.valid_count == sum(lengths) - sum(length < 64 for length in lengths)
    short = [micro for micro in (part.trimmed() for part in step.batch.split(1)) if micro.tokens_BS.shape[1] < 64]
    assert short and all(micro.tokens_BS.shape[1] >= micro.lengths[0] for micro in short)
    assert {micro.tokens_BS.shape[1] for micro in short} <= {8, 16, 32}


def test_endless_noise_is_not_packed():
    data = Data(sources=("builtin:synthetic",), packing="best-fit")
    with pytest.raises(UserError, match=r'data\.packing = "best-fit" needs text with an end'):
        training_stream(prepare(data, 300), data, 64, seed=0)
