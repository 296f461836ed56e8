"""First values for this rank's shards, without the whole model ever being on a rank."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.model.initialise import ROWS_PER_DRAW, initial_rows
from meshwright.parallel.pieces import Piece


def fill(masters: dict[str, nn.Parameter], pieces: dict[str, Piece], shape: Model, seed: int) -> None:
    """Draw every master's own rows and columns; the values are those any other layout gives the same places."""
    pool_size = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(pool_size) as pool:
        list(pool.map(lambda name: _fill_one(name, masters[name].detach(), pieces[name], shape, seed), masters))


def _fill_one(name: str, master: Tensor, piece: Piece, shape: Model, seed: int) -> None:
    inside = int((piece.rows < piece.shape[0]).sum())  # padding rows come last
    master[inside:].zero_()
    rows = piece.rows[:inside].numpy()
    # Runs of neighbouring rows, none longer than one draw, so that no more is ever held beside the shard.
    cuts = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] % ROWS_PER_DRAW == 0)) + 1
    place = 0
    for run in np.split(rows, cuts):
        if len(run):
            drawn = initial_rows(shape, name, piece.shape, seed, slice(int(run[0]), int(run[-1]) + 1))
            master[place : place + len(run)].copy_(drawn if piece.columns is None else drawn[:, piece.columns])
            place += len(run)
