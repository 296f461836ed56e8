"""Generated sounds: pure functions of a window's number that say what was dialled, in as many windows as they fill."""

from dataclasses import replace

import numpy as np
import torch

from meshwright.data import Loader, RunningWindows, Stream
from meshwright.data.made import NoisyWindows, Slots
from meshwright.data.samples import IGNORE
from meshwright.data.store import SyntheticTokens
from meshwright.data.tones import END, HIGH_HZ, KEYS, LONGEST_S, LOW_HZ, MOST_KEYS, RATE, SOUND, WORDS, ToneWindows

SLOTS = Slots(2, (20, 25), 13)
WINDOWS = ToneWindows(SLOTS, 32, 0)


def test_a_window_is_a_sound_and_the_learned_keys() -> None:
    filled = set()
    for number in range(40):
        dialled, sample = WINDOWS.dialled(number), WINDOWS.read(number)
        windows = WINDOWS.filled(number)
        filled.add(windows)
        assert sample.tokens_S[: 13 * windows].tolist() == [SOUND] * 13 * windows
        learned = [WORDS[label] for label in sample.labels_S if label != IGNORE]
        assert learned == [*dialled.keys, WORDS[END]]
        assert (sample.valid, sample.length) == (WINDOWS.count_valid(number), WINDOWS.length(number))
        assert sample.media is not None
        places = [list(range(13 * slot, 13 * slot + 13)) if slot < windows else [-1] * 13 for slot in range(2)]
        assert sample.media.places_KT().tolist() == places
    assert filled == {1, 2}


def test_a_key_sounds_like_its_two_tones() -> None:
    """The loudest frequencies below and above the gap between both sets are those of the key, within its tuning."""
    for number in range(30):
        dialled = WINDOWS.dialled(number)
        wave = dialled.wave()
        assert len(wave) == dialled.samples <= LONGEST_S * RATE and 1 <= len(dialled.keys) <= MOST_KEYS
        for key, (start, stop) in zip(dialled.keys, dialled.spans(), strict=True):
            spectrum = np.abs(np.fft.rfft(wave[start:stop], 8 * RATE))
            hertz = np.arange(len(spectrum)) / 8
            for low, high, tones, place in ((400, 1250, LOW_HZ, 0), (1250, 3500, HIGH_HZ, 1)):
                within = np.where((hertz > low) & (hertz < high), spectrum, 0.0)
                expected = tones[divmod(KEYS.index(key), 4)[place]]
                assert abs(hertz[within.argmax()] / expected - 1) < 0.05


def test_every_key_and_length_occurs_and_held_out_sounds_are_others() -> None:
    heard = [WINDOWS.dialled(number).keys for number in range(400)]
    assert {key for keys in heard for key in keys} == set(KEYS)
    assert {len(keys) for keys in heard} == set(range(1, MOST_KEYS + 1))
    held_out = replace(WINDOWS, split=1)
    assert {WINDOWS.key(number) for number in range(400)}.isdisjoint(held_out.key(number) for number in range(400))


def test_workers_and_positions_deliver_the_same_sounds() -> None:
    stream = Stream((WINDOWS,), seed=3)
    alone = Loader(stream, global_batch=4)
    steps = [next(alone).batch for _ in range(3)]
    helped = Loader(stream, global_batch=4, position=4, workers=1)
    try:
        for expected in steps[1:]:
            found = next(helped).batch
            assert torch.equal(found.tokens_BS, expected.tokens_BS)
            assert found.media is not None and expected.media is not None
            assert found.media.items_BK.dtype == torch.float32
            assert torch.equal(found.media.items_BK, expected.media.items_BK)
            assert torch.equal(found.media.places_BKT, expected.media.places_BKT)
    finally:
        helped.close()


def test_noise_for_a_model_that_listens_is_numbers_around_zero() -> None:
    text = RunningWindows(SyntheticTokens(50, key=0), 32)
    sample = NoisyWindows(text, Slots(2, (5, 7), 4), key=0).read(3)
    assert sample.media is not None and sample.media.dtype == np.float32
    items_K = np.empty((2, 5, 7), np.float32)
    sample.media.fill(items_K)
    assert -1 <= items_K.min() < -0.5 and 0.5 < items_K.max() < 1
