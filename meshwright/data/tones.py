"""Keys of a telephone that sound one after another, and which they were: speech-to-text small enough to be learned on a
CPU in minutes. Sound i is a pure function of (split, i)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from meshwright.data.corpus import Corpus
from meshwright.data.hashing import fraction_of, mix
from meshwright.data.made import Slots, TaskWindows, noise, require_task, task_corpus
from meshwright.data.media.sound import wave_windows
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError
from meshwright.job.audio import FRAMES_PER_SECOND, Audio

TONES = "builtin:tones"
KEYS = "0123456789ABCD*#"
WORDS = ("<|endoftext|>", "<audio>", *KEYS, "<unk>")
"""The vocabulary: a word's place is its token."""
END, SOUND, UNKNOWN = (WORDS.index(name) for name in ("<|endoftext|>", "<audio>", "<unk>"))
RATE = 8000
"""Samples per second."""
LOW_HZ, HIGH_HZ = (500.0, 650.0, 845.0, 1100.0), (1430.0, 1860.0, 2420.0, 3140.0)
"""A key is one of each together."""
MOST_KEYS = 4
_LEAD_S, _TONE_S, _PAUSE_S = (0.0, 0.02), (0.04, 0.07), (0.03, 0.05)
"""Silence before the first key, a key, and the silence after it: at least and at most."""
_PITCH, _LEVEL, _NOISE = 0.03, (0.3, 1.0), 0.1
"""By how much a key may be out of tune, how loud it is, and how loud the noise behind all of it may be."""
_FADE_S = 0.005
LONGEST_S = _LEAD_S[1] + MOST_KEYS * (_TONE_S[1] + _PAUSE_S[1])


@dataclass(frozen=True)
class Dialled:
    """Some keys, and what is random about how they sound."""

    keys: str
    key: int

    def _drawn(self, number: int, least: float, most: float) -> float:
        return least + (most - least) * fraction_of(number, self.key)

    def spans(self) -> list[tuple[int, int]]:
        """Where every key sounds, in samples."""
        spans, end = [], self._drawn(0, *_LEAD_S)
        for place in range(len(self.keys)):
            stop = end + self._drawn(8 * place + 1, *_TONE_S)
            spans.append((round(end * RATE), round(stop * RATE)))
            end = stop + self._drawn(8 * place + 2, *_PAUSE_S)
        return spans

    @property
    def samples(self) -> int:
        """Length of the sound: it ends with the last key."""
        return self.spans()[-1][1]

    def wave(self) -> NDArray[np.float32]:
        """The sound: two tones for every key, each key out of tune, as long and as loud as chance has it, on noise."""
        hiss = noise(self.samples, self.key).astype(np.float64) / 128 - 1
        wave = self._drawn(7, 0.0, _NOISE) * hiss
        for place, (start, stop) in enumerate(self.spans()):
            number = KEYS.index(self.keys[place])
            time = np.arange(stop - start) / RATE
            tune = 1 + self._drawn(8 * place + 3, -_PITCH, _PITCH)
            phases = [self._drawn(8 * place + part, 0, 2 * np.pi) for part in (4, 5)]
            tones = (LOW_HZ[number // 4], HIGH_HZ[number % 4])
            sound = sum(np.sin(2 * np.pi * tune * hertz * time + at) for hertz, at in zip(tones, phases, strict=True))
            fade = np.minimum(1.0, np.minimum(time, time[::-1]) / _FADE_S)
            wave[start:stop] += 0.5 * self._drawn(8 * place + 6, *_LEVEL) * fade * sound
        return wave.astype(np.float32)


@dataclass(frozen=True)
class ToneWindows(TaskWindows):
    """Sequences of one sound each, in as many slots as it fills, and the keys that were dialled."""

    placeholder: ClassVar[int] = SOUND
    padding: ClassVar[int] = END

    def dialled(self, window: int) -> Dialled:
        """What a window sounds like."""
        key = self.key(window)
        count = 1 + mix(0, key=key) % MOST_KEYS
        return Dialled("".join(KEYS[mix(place + 1, key=key) % len(KEYS)] for place in range(count)), key)

    def text(self, window: int) -> tuple[list[int], list[int]]:
        """Nothing is asked; the keys, and the end."""
        return [], [*(WORDS.index(key) for key in self.dialled(window).keys), END]

    def filled(self, window: int) -> int:
        """Windows of sound that it takes."""
        return -(-self.dialled(window).samples // self._samples)

    def items(self, window: int) -> NDArray[np.float32]:
        """The sound as log-mel features."""
        return wave_windows(self.dialled(window).wave(), self._samples, RATE, self.slots.shape[0])

    @property
    def _samples(self) -> int:
        return self.slots.shape[1] * (RATE // FRAMES_PER_SECOND)


def tones_corpus(audio: Audio | None, vocab_size: int, sequence_length: int, others: int) -> Corpus:
    """Sounds for a model with these slots; refuses a model that cannot read them."""
    if audio is None:
        raise UserError(f'data.sources = ["{TONES}"] has sound, and the model reads none; set [model.audio]')
    most = audio.windows * audio.tokens + MOST_KEYS + 1
    require_task(TONES, others, len(WORDS), vocab_size, most, sequence_length)
    if audio.windows * audio.frames < LONGEST_S * FRAMES_PER_SECOND:
        raise UserError(
            f"model.audio.windows = {audio.windows} of model.audio.seconds = {audio.seconds:g} are too short for "
            f"{TONES}, whose sounds last up to {LONGEST_S:g} seconds; raise one of them"
        )
    corpus = task_corpus(ToneWindows, Slots.of(audio), vocab_size, sequence_length)
    return replace(corpus, tokenizer=tones_tokenizer())


def tones_tokenizer() -> Tokenizer:
    """The keys as a tokenizer, by which a trained model can be let hear a sound: every letter is a token."""
    inner = tokenizers.Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, WORDS[UNKNOWN]))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([WORDS[END], WORDS[SOUND]])
    return Tokenizer(inner, END)
