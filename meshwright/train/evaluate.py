"""Held-out loss: the mean over every valid token of the same batches each time, split over data-parallel ranks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.data import IGNORE, Batch
from meshwright.parallel import Engine, PipeDream, World

_AT_ONCE = 64
"""Batches per rank that are loaded at a time."""


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text."""

    loss: float
    """Nats per token."""
    perplexity: float
    bits_per_byte: float | None
    """Per byte of the text, so that models with different tokenizers compare; None if tokens have no text."""
    tokens: int
    bytes: int


def evaluate(engine: Engine | PipeDream, batches: Iterable[Batch], world: World) -> float:
    """Mean loss per valid token over the batches, without dropout; the same on every rank."""
    loss_total, valid_total, _ = _totals(engine, batches, world, None)
    return loss_total / max(1.0, valid_total)


def score(
    engine: Engine | PipeDream, batches: Iterable[Batch], world: World, byte_lengths: NDArray[np.int64] | None
) -> Score:
    """Every metric over the batches; bytes are those of the tokens that the loss counts."""
    loss_total, valid_total, byte_total = _totals(engine, batches, world, byte_lengths)
    loss = loss_total / max(1.0, valid_total)
    bits_per_byte = loss_total / math.log(2) / byte_total if byte_total else None
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Score(loss, perplexity, bits_per_byte, int(valid_total), int(byte_total))


def _totals(
    engine: Engine | PipeDream, batches: Iterable[Batch], world: World, byte_lengths: NDArray[np.int64] | None
) -> list[float]:
    """Sums over all ranks of the loss, of the tokens it counts, and of the bytes they represent."""
    iterator = iter(batches)
    totals = [0.0, 0.0, 0.0]
    while everyones := list(islice(iterator, _AT_ONCE * world.data_ranks)):
        totals = [a + b for a, b in zip(totals, _sums(engine, everyones, world, byte_lengths), strict=True)]
    return totals


def _sums(
    engine: Engine | PipeDream, everyones: list[Batch], world: World, byte_lengths: NDArray[np.int64] | None
) -> list[float]:
    turns = [everyones[first : first + world.data_ranks] for first in range(0, len(everyones), world.data_ranks)]
    # Sharded parameters are gathered collectively: a rank without its own batch keeps step with another's.
    mine = [turn[world.data_rank] if world.data_rank < len(turn) else turn[0] for turn in turns]
    total, count, size_bytes = torch.zeros((), dtype=torch.float64, device=world.device), 0, 0
    for turn, batch, loss_sum in zip(turns, mine, engine.held_out(mine), strict=True):
        if world.data_rank < len(turn):
            total += loss_sum.double()
            count += batch.valid_count()
            size_bytes += 0 if byte_lengths is None else _bytes_of(batch, byte_lengths)
    # Tensor-parallel ranks compute the same loss; of all ranks that read the same tokens one counts them.
    counts = [count, size_bytes] if world.leads_data else [0, 0]
    return world.sum_over_world([total / world.axis_size("tp"), *counts])


def _bytes_of(batch: Batch, byte_lengths: NDArray[np.int64]) -> int:
    labels = batch.labels_BS.cpu().numpy()
    return int(byte_lengths[labels[labels != IGNORE]].sum())
