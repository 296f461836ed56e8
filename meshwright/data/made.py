"""Pictures and sound made from numbers alone: noise in synthetic text, and tasks that a small model can learn.

Both are pure functions of a window's number, so every layout and every resumed run sees the same. K slots for items in
a sequence, T tokens of an item, S places.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from meshwright.data.corpus import Corpus
from meshwright.data.hashing import mix, mix_array
from meshwright.data.samples import IGNORE, Sample, Windows
from meshwright.data.store import Int64Array, SyntheticTokens
from meshwright.errors import UserError
from meshwright.job.encoder import Encoder
from meshwright.job.fields import ItemPlan

HELD_OUT_KEY = -1
MADE = 1 << 20
"""Sequences of every split of a task; a run reads few of them."""
TRAIN, HELD_OUT = 0, 1


@dataclass(frozen=True)
class Slots:
    """What a model reads of a sequence: so many items at most, each of this size and with so many tokens."""

    count: int
    shape: tuple[int, ...]
    tokens: int

    @classmethod
    def of(cls, encoder: Encoder) -> "Slots":
        """The slots of a model's section."""
        return cls(encoder.slots, encoder.item_shape, encoder.tokens)

    @property
    def pictures(self) -> bool:
        """Whether items are pictures, which are bytes, and not sound."""
        return len(self.shape) == 3


@dataclass(frozen=True)
class MadeItems:
    """The items of a sample, made with it; the model normalises pictures."""

    items_K: NDArray[Any]
    their_places_KT: Int64Array
    scale = None

    @property
    def plan(self) -> ItemPlan:
        """Size, tokens and slots."""
        return ItemPlan(self.items_K.shape[1:], self.their_places_KT.shape[1], len(self.items_K))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the items."""
        return self.items_K.dtype

    def places_KT(self) -> Int64Array:
        """The place of every token of every item, -1 in empty slots."""
        return self.their_places_KT

    def fill(self, items_K: NDArray[Any]) -> list[str]:
        """Copy the items into their slots; none can be missing."""
        items_K[...] = self.items_K
        return []

    def encoded(self, row: int) -> list[Any]:
        """Nothing: they have no bytes to be decoded elsewhere."""
        return []

    def keyed(self, key: int) -> "MadeItems":
        """The same items: nothing about them is left to chance."""
        return self


@dataclass(frozen=True)
class NoisyWindows:
    """Windows of text with items of noise over some of their tokens: in every window another number of them, and some
    cut off at its end or at that of its text."""

    text: Windows
    slots: Slots
    key: int

    def __len__(self) -> int:
        return len(self.text)

    @property
    def sequence_length(self) -> int:
        """Places in each."""
        return self.text.sequence_length

    @property
    def uniform(self) -> bool:
        """Whether every label of every window counts: items change no label."""
        return self.text.uniform

    def count_valid(self, window: int) -> int:
        """Labels of a window that count in the loss."""
        return self.text.count_valid(window)

    def length(self, window: int) -> int:
        """Places of a window before the padding."""
        return self.text.length(window)

    def read(self, window: int) -> Sample:
        """The window with its items."""
        slots, sample, chance = self.slots, self.text.read(window), mix(window, key=self.key)
        places_KT = np.full((slots.count, slots.tokens), -1, np.int64)
        room = max(1, sample.length // slots.count)  # in the padding nothing would depend on them
        for slot in range(slots.count):
            drawn = mix(slot, key=chance)
            if slots.count > 1 and drawn % 4 == 0:
                continue  # an empty slot
            first = slot * room + drawn // 4 % room
            own = np.arange(first, min(first + slots.tokens, (slot + 1) * room))
            places_KT[slot, : len(own)] = own
        bytes_K = noise(slots.count * prod(slots.shape), chance).reshape(slots.count, *slots.shape)
        items_K = bytes_K if slots.pictures else bytes_K.astype(np.float32) / 128 - 1
        return sample.with_media(MadeItems(items_K, places_KT))


def with_noise(windows: Windows, slots: Slots | None, key: int) -> Windows:
    """The windows, with items of noise for a model that has slots for them."""
    return windows if slots is None else NoisyWindows(windows, slots, key)


def noise(count: int, key: int) -> NDArray[np.uint8]:
    """So many bytes that depend on the key alone."""
    return (mix_array(np.arange(count), key) >> np.uint64(32)).astype(np.uint8)


@dataclass(frozen=True)
class TaskWindows(ABC):
    """Sequences of some items, what is asked about them, and the answer, which alone counts in the loss."""

    slots: Slots
    sequence_length: int
    split: int

    placeholder: ClassVar[int]
    padding: ClassVar[int]

    @abstractmethod
    def text(self, window: int) -> tuple[list[int], list[int]]:
        """The tokens of what is asked, and those of the answer."""

    @abstractmethod
    def filled(self, window: int) -> int:
        """Slots that have an item."""

    @abstractmethod
    def items(self, window: int) -> NDArray[Any]:
        """The items of the slots that have one."""

    def key(self, window: int) -> int:
        """What a window's chance is drawn from."""
        return mix(window, key=mix(self.split, key=1))

    def __len__(self) -> int:
        return MADE

    @property
    def uniform(self) -> bool:
        """Whether every label counts: only those of answers do."""
        return False

    def read(self, window: int) -> Sample:
        """The window as a sample."""
        slots, (asked, answer) = self.slots, self.text(window)
        items = self.items(window)
        places = len(items) * slots.tokens
        text = [self.placeholder] * places + asked + answer
        tokens_S = np.full(self.sequence_length + 1, self.padding, np.int64)
        tokens_S[: len(text)] = text
        labels_S = np.full(self.sequence_length, IGNORE, np.int64)
        learned = slice(len(text) - len(answer) - 1, len(text) - 1)
        labels_S[learned] = tokens_S[1:][learned]
        items_K = np.zeros((slots.count, *slots.shape), items.dtype)
        items_K[: len(items)] = items
        places_KT = np.full((slots.count, slots.tokens), -1, np.int64)
        places_KT[: len(items)] = np.arange(places).reshape(-1, slots.tokens)
        media = MadeItems(items_K, places_KT)
        return Sample(tokens_S[:-1], labels_S, None, min(len(text), self.sequence_length), media=media)

    def count_valid(self, window: int) -> int:
        """Labels of a window that count in the loss: those of its answer."""
        return len(self.text(window)[1])

    def length(self, window: int) -> int:
        """Places of a window before the padding."""
        asked, answer = self.text(window)
        return min(self.filled(window) * self.slots.tokens + len(asked) + len(answer), self.sequence_length)


def task_corpus(kind: type[TaskWindows], slots: Slots, vocab_size: int, sequence_length: int) -> Corpus:
    """A task's sequences to train on, and others that are held out."""
    none = SyntheticTokens(vocab_size, key=0, count=0)
    windows = kind(slots, sequence_length, TRAIN), kind(slots, sequence_length, HELD_OUT)
    return Corpus(None, none, none, None, windows=windows)


def require_task(source: str, others: int, words: int, vocab_size: int, most: int, sequence_length: int) -> None:
    """Refuse a job whose model cannot read a task: its source among others, its words, its longest sequence."""
    if others:
        raise UserError(f"data.sources mixes {source} with {others} other; leave it alone in the list")
    if vocab_size < words:
        raise UserError(f"model.vocab_size = {vocab_size} is less than the {words} words of {source}; raise it")
    if most > sequence_length + 1:
        raise UserError(
            f"batch.sequence_length = {sequence_length} is too short for the {most} tokens of a sequence of {source}; "
            f"set it to {most} or more"
        )
