"""First values for this rank's shards, without the whole model ever being on a rank."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.model.initialise import ROWS_PER_DRAW, initial_rows
from meshwright.parallel.pieces import Piece


def fill(masters: dict[str, nn.Parameter], pieces: dict[str, Piece], shape: Model, seed: int) -> None:
    """Draw every master's own rows and columns; the values are those any other layout gives the same places."""

    def draw(run: tuple[str, Tensor, slice]) -> None:
        name, target, rows = run
        drawn = initial_rows(shape, name, pieces[name].shape, seed, rows)
        columns = pieces[name].columns
        target.copy_(drawn if columns is None else drawn[:, columns])

    runs = [run for name, master in masters.items() for run in _runs(name, master.detach(), pieces[name])]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(draw, runs))


def _runs(name: str, master: Tensor, piece: Piece) -> Iterator[tuple[str, Tensor, slice]]:
    """Runs of neighbouring rows, none longer than one draw, so that little is ever held beside the shard."""
    rows = piece.rows.numpy()
    rows = rows[rows < piece.shape[0]]
    master[len(rows) :].zero_()  # padding rows come last
    cuts = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] % ROWS_PER_DRAW == 0)) + 1
    place = 0
    for run in np.split(rows, cuts):
        if len(run):
            yield name, master[place : place + len(run)], slice(int(run[0]), int(run[-1]) + 1)
        place += len(run)
