"""Initial values for this rank's shards, without the whole model ever being on a rank."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torch import Tensor, nn

from meshwright.checkpoint import HfWeights
from meshwright.job import Model, fetch_start, start_folder
from meshwright.model import initial_rows, routers
from meshwright.model.initialise import ROWS_PER_DRAW
from meshwright.parallel.shard_index import ShardIndex


def fill(masters: dict[str, nn.Parameter], shards: dict[str, ShardIndex], shape: Model, seed: int) -> None:
    """Give every master its own rows and columns; any other layout gives the same values.

    They are drawn, or read from the folder the model starts from.
    """
    first_rows = _first_rows(shape, seed)

    def put(run: tuple[str, Tensor, slice]) -> None:
        name, target, rows = run
        values = first_rows(name, shards[name].shape, rows)
        columns = shards[name].columns
        target.copy_(values if columns is None else values[:, columns])

    runs = [run for name, master in masters.items() for run in _runs(name, master.detach(), shards[name])]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(put, runs))


def fill_preferences(model: nn.Module, shape: Model) -> None:
    """Give routers the preferences of the folder that a job starts from; without one they have none yet."""
    folder = start_folder(shape)
    preferences_LN = None if folder is None else HfWeights(folder, shape).preferences()
    if preferences_LN is not None:
        for layer, router in routers(model):
            router.preference.copy_(preferences_LN[layer])


def _first_rows(shape: Model, seed: int) -> Callable[[str, tuple[int, ...], slice], Tensor]:
    """The function that gives some rows of a parameter by its name and whole size."""
    folder = start_folder(shape)
    if folder is not None:
        fetch_start(shape)  # `train` has; other callers have not, and each machine has its own cache
        return HfWeights(folder, shape).rows
    return lambda name, size, rows: initial_rows(shape, name, size, seed, rows)


def _runs(name: str, master: Tensor, shard: ShardIndex) -> Iterator[tuple[str, Tensor, slice]]:
    """Runs of neighbouring rows, none longer than one draw, so that little is held besides the shard."""
    rows = shard.rows.numpy()
    rows = rows[rows < shard.shape[0]]
    master[len(rows) :].zero_()  # padding rows come last
    cuts = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] % ROWS_PER_DRAW == 0)) + 1
    place = 0
    for run in np.split(rows, cuts):
        if len(run):
            yield name, master[place : place + len(run)], slice(int(run[0]), int(run[-1]) + 1)
        place += len(run)
