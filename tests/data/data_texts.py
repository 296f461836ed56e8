"""Small documents for the data tests."""

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "rain",
    "falls",
    "on",
    "seven",
    "quiet",
    "hills",
]


def text_of(number: int, words: int = 60) -> str:
    """A small document, different for every number."""
    return " ".join(WORDS[(number * 7 + i * i + i) % len(WORDS)] for i in range(words)) + f" {number}."
