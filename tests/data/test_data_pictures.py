"""Generated pictures: pure functions of a window's number, counted without being drawn, the same through workers."""

from dataclasses import replace

import numpy as np
import torch

from meshwright.data import Loader, RunningWindows, Stream
from meshwright.data.batch import stack_samples
from meshwright.data.made import NoisyWindows, Slots
from meshwright.data.samples import IGNORE
from meshwright.data.shapes import COLOURS, COUNTS, END, KINDS, PICTURE, QUESTIONS, WORDS, ShapeWindows
from meshwright.data.store import SyntheticTokens

SLOTS = Slots(1, (3, 32, 32), 16)
WINDOWS = ShapeWindows(SLOTS, 32, 0)


def test_a_window_is_a_picture_a_question_and_a_learned_answer() -> None:
    for number in range(40):
        drawing, sample = WINDOWS.drawing(number), WINDOWS.read(number)
        text = [WORDS[token] for token in sample.tokens_S]
        asked = len(drawing.question.split()) + 1
        assert text[:16] == [WORDS[PICTURE]] * 16
        assert " ".join(text[16 : 16 + asked]) == f"{drawing.question} ?"
        learned = [WORDS[label] for label in sample.labels_S if label != IGNORE]
        assert " ".join(learned) == f"{drawing.answer} {WORDS[END]}"
        assert (sample.valid, sample.length) == (WINDOWS.count_valid(number), WINDOWS.length(number))
        assert sample.media is not None and sample.media.places_KT().tolist() == [list(range(16))]


def test_pictures_show_what_the_answer_says() -> None:
    """The pixels of the colour are there, more of them for more shapes, and none of another colour."""
    drawing = WINDOWS.drawing(0)
    for kind in KINDS:
        for colour, rgb in COLOURS.items():
            areas = []
            for count in range(1, len(COUNTS) + 1):
                pixels = replace(drawing, kind=kind, colour=colour, count=count).picture(32).astype(int)
                areas.append(int((pixels == np.array(rgb).reshape(3, 1, 1)).all(0).sum()))
                for other, unlike in COLOURS.items():
                    assert other == colour or not (pixels == np.array(unlike).reshape(3, 1, 1)).all(0).any()
            assert areas == sorted(set(areas)) and areas[0] > 20
    drawn = {kind: replace(drawing, kind=kind, count=4).picture(32).tobytes() for kind in KINDS}
    assert len(set(drawn.values())) == len(KINDS)


def test_every_answer_occurs_and_held_out_drawings_are_others() -> None:
    seen = {(d.colour, d.kind, d.count, d.question) for d in map(WINDOWS.drawing, range(4000))}
    assert len(seen) == len(COLOURS) * len(KINDS) * len(COUNTS) * len(QUESTIONS)
    keys = {WINDOWS.drawing(number).key for number in range(1000)}
    held_out = replace(WINDOWS, split=1)
    assert keys.isdisjoint(held_out.drawing(number).key for number in range(1000))


def test_workers_and_positions_deliver_the_same_pictures() -> None:
    stream = Stream((WINDOWS,), seed=3)
    alone = Loader(stream, global_batch=4)
    steps = [next(alone).batch for _ in range(3)]
    helped = Loader(stream, global_batch=4, position=4, workers=1)
    try:
        for expected in steps[1:]:
            found = next(helped).batch
            assert torch.equal(found.tokens_BS, expected.tokens_BS)
            assert found.media is not None and expected.media is not None
            assert torch.equal(found.media.items_BK, expected.media.items_BK)
            assert torch.equal(found.media.places_BKT, expected.media.places_BKT)
    finally:
        helped.close()


def test_noise_leaves_some_slots_empty_and_overlaps_nowhere() -> None:
    text = RunningWindows(SyntheticTokens(50, key=0), 32)
    windows = NoisyWindows(text, Slots(2, (3, 8, 8), 4), key=0)
    empty = cut = 0
    for number in range(60):
        sample = windows.read(number)
        assert sample.media is not None
        places_KT = sample.media.places_KT()
        places = places_KT[places_KT >= 0]
        assert len(set(places.tolist())) == len(places) and (places < 32).all()
        empty += int((places_KT < 0).all(1).sum())
        cut += int(((places_KT < 0).any(1) & (places_KT >= 0).any(1)).sum())
        assert np.array_equal(sample.labels_S, text.read(number).labels_S)
    assert empty and cut


def test_a_picture_in_the_padding_is_cut_off_with_it() -> None:
    sample = WINDOWS.read(0)
    short = replace(sample, length=15)
    batch = stack_samples([short, short], [0, 1])
    assert batch.media is not None
    later = replace(batch.media, places_BKT=batch.media.places_BKT + 8)
    cut = replace(batch, media=later).trimmed()
    assert cut.tokens_BS.shape[1] == 16 and cut.media is not None
    assert cut.media.places_BKT[0, 0].tolist() == [*range(8, 16), *[-1] * 8]
