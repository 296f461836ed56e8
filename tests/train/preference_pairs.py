"""A tiny model with weights by a formula and three pairs of answers, for the tests and for `trl_values.py`."""

import numpy as np
import torch

from meshwright.data.batch import Batch, stack_samples
from meshwright.data.samples import IGNORE, Sample
from meshwright.job.model import Model
from meshwright.model import Decoder

END = 52
SHAPE = Model(
    vocab_size=53,
    width=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn_width=36,
    max_sequence_length=64,
    rope_theta=10000.0,
    tied=False,
)
PAIRS = [
    ([3, 1, 4], [1, 5, 9, 2, 6], [5, 3]),
    ([2, 7], [1, 8], [2, 8, 1, 8, 2, 8]),
    ([9, 9, 9, 1], [4], [30, 41, 42]),
]
"""Prompts with their chosen and rejected answers; END ends every answer."""


def model(phase: float, dtype: torch.dtype = torch.float64) -> Decoder:
    """The decoder with weights that no random generator decides."""
    decoder = Decoder(SHAPE).to(dtype)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(decoder.named_parameters())):
            waves = torch.cos(torch.arange(parameter.numel(), dtype=torch.float64) * (0.7 + 0.31 * number) + phase)
            values = 0.35 * waves if parameter.dim() > 1 else 1 + 0.1 * waves
            parameter.copy_(values.view_as(parameter))
    return decoder


def answers() -> list[tuple[list[int], list[int]]]:
    """Prompts and answers in turn, chosen before rejected."""
    return [(prompt, [*answer, END]) for prompt, *both in PAIRS for answer in both]


def packed(sequence_length: int = 48) -> Batch:
    """All pairs in one sequence, as training reads them, and a second sequence with the first pair alone."""
    return stack_samples([_sample(PAIRS, sequence_length, 0), _sample(PAIRS[:1], sequence_length, 100)], [0, 1])


def _sample(pairs: list[tuple[list[int], list[int], list[int]]], length: int, first: int) -> Sample:
    tokens, labels = np.zeros(length, np.int64), np.full(length, IGNORE, np.int64)
    starts, place = [], 0
    for prompt, *both in pairs:
        for answer in both:
            whole = [*prompt, *answer, END]
            tokens[place : place + len(whole)] = whole
            labels[place + len(prompt) - 1 : place + len(whole) - 1] = [*answer, END]
            starts.append(place)
            place += len(whole)
    return Sample(tokens, labels, np.array([*starts, place]), place, np.array(starts[::2]) + first)
