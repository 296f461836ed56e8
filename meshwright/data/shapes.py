"""Drawings of coloured shapes, each with a question and its answer: a task that a model which reads pictures can learn
on a CPU in minutes. Drawing i is a pure function of (split, i)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from meshwright.data.corpus import Corpus
from meshwright.data.hashing import mix
from meshwright.data.made import Slots, TaskWindows, noise, require_task, task_corpus
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError
from meshwright.job.vision import Vision

SHAPES = "builtin:shapes"
COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 230), "yellow": (230, 210, 50)}
KINDS = ("circle", "square", "triangle")
COUNTS = ("one", "two", "three", "four")
QUESTIONS = ("what colour", "what shape", "how many", "what is there")
WORDS = (
    *(
        "<|endoftext|>",
        "<image>",
        "?",
        ".",
        "a",
        "it",
        "is",
        "there",
        "are",
        "they",
        "what",
        "colour",
        "shape",
        "how",
        "many",
    ),
    *COLOURS,
    *KINDS,
    *(f"{kind}s" for kind in KINDS),
    *COUNTS,
    "<unk>",
)
"""The vocabulary: a word's place is its token."""
END, PICTURE, UNKNOWN = (WORDS.index(name) for name in ("<|endoftext|>", "<image>", "<unk>"))
_GRID = 2
"""Cells of a drawing in either direction, each with one shape or none."""


@dataclass(frozen=True)
class Drawing:
    """What is in a drawing, and what is asked about it."""

    colour: str
    kind: str
    count: int
    question: str
    key: int

    @property
    def answer(self) -> str:
        """A sentence."""
        things = f"{COUNTS[self.count - 1]} {self.colour} {self.kind}{'s' * (self.count > 1)}"
        verb = "are" if self.count > 1 else "is"
        return {
            "what colour": f"{'they are' if self.count > 1 else 'it is'} {self.colour} .",
            "what shape": f"they are {self.kind}s ." if self.count > 1 else f"it is a {self.kind} .",
            "how many": f"there {verb} {COUNTS[self.count - 1]} .",
            "what is there": f"there {verb} {things} .",
        }[self.question]

    def words(self) -> tuple[list[str], list[str]]:
        """Question and answer, word by word, with the marks that end them."""
        return [*self.question.split(), "?"], [*self.answer.split(), WORDS[END]]

    def picture(self, size: int) -> NDArray[np.uint8]:
        """The drawing (channels, size, size): shapes in some cells, of random sizes, a little off centre, on noise."""
        pixels = noise(3 * size * size, self.key).reshape(3, size, size) // np.uint8(5)
        cell = size // _GRID
        cells = sorted(range(_GRID * _GRID), key=lambda number: mix(number, key=self.key))[: self.count]
        for number in cells:
            chance = mix(number + 64, key=self.key)
            radius = cell * (35 + chance % 10) / 100
            off_y, off_x = ((chance >> shift) % 5 - 2 for shift in (8, 16))
            centre_y = (number // _GRID + 0.5) * cell + off_y * cell / 32
            centre_x = (number % _GRID + 0.5) * cell + off_x * cell / 32
            pixels[:, _inside(self.kind, size, centre_y, centre_x, radius)] = np.array(
                COLOURS[self.colour], np.uint8
            ).reshape(3, 1)
        return pixels


def _inside(kind: str, size: int, centre_y: float, centre_x: float, radius: float) -> NDArray[np.bool_]:
    """The pixels of one shape."""
    y, x = np.mgrid[:size, :size] + 0.5
    down, right = y - centre_y, np.abs(x - centre_x)
    if kind == "circle":
        inside = down**2 + right**2 <= radius**2
    elif kind == "square":
        inside = (np.abs(down) <= 0.9 * radius) & (right <= 0.9 * radius)
    else:
        inside = (np.abs(down) <= radius) & (right <= (down + radius) / 2)
    found: NDArray[np.bool_] = inside
    return found


@dataclass(frozen=True)
class ShapeWindows(TaskWindows):
    """Sequences of one drawing each: its picture's tokens, a question, and the answer."""

    placeholder: ClassVar[int] = PICTURE
    padding: ClassVar[int] = END

    def drawing(self, window: int) -> Drawing:
        """What a window shows and asks."""
        key = self.key(window)
        part = [mix(number, key=key) for number in range(4)]
        return Drawing(
            list(COLOURS)[part[0] % len(COLOURS)],
            KINDS[part[1] % len(KINDS)],
            1 + part[2] % len(COUNTS),
            QUESTIONS[part[3] % len(QUESTIONS)],
            key,
        )

    def text(self, window: int) -> tuple[list[int], list[int]]:
        """Question and answer as tokens."""
        question, answer = self.drawing(window).words()
        return [WORDS.index(word) for word in question], [WORDS.index(word) for word in answer]

    def filled(self, window: int) -> int:
        """One drawing."""
        return 1

    def items(self, window: int) -> NDArray[np.uint8]:
        """The drawing."""
        return self.drawing(window).picture(self.slots.shape[1])[None]


LONGEST = max(
    len([*Drawing("red", "circle", 2, question, 0).words()[0], *Drawing("red", "circle", 2, question, 0).words()[1]])
    for question in QUESTIONS
)
"""Words of a question and its answer at most."""


def shapes_corpus(vision: Vision | None, vocab_size: int, sequence_length: int, others: int) -> Corpus:
    """Drawings for a model with these slots; refuses a model that cannot read them."""
    if vision is None:
        raise UserError(f'data.sources = ["{SHAPES}"] has pictures, and the model reads none; set [model.vision]')
    require_task(SHAPES, others, len(WORDS), vocab_size, vision.tokens + LONGEST, sequence_length)
    corpus = task_corpus(ShapeWindows, Slots.of(vision), vocab_size, sequence_length)
    return replace(corpus, tokenizer=shapes_tokenizer())


def shapes_tokenizer() -> Tokenizer:
    """The words as a tokenizer, by which a trained model can be asked."""
    inner = tokenizers.Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, WORDS[UNKNOWN]))
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    inner.pre_tokenizer = pre_tokenizers.Sequence(split)
    inner.add_special_tokens([WORDS[END], WORDS[PICTURE]])
    return Tokenizer(inner, END)
