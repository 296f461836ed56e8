"""Initial values for this rank's shards, without the whole model ever being on a rank."""

import os
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from meshwright.checkpoint import HfWeights, PeftAdapter, Rows, first_rows
from meshwright.job import Model, start_folder
from meshwright.model import initial_rows, routers
from meshwright.model.adapter import MAGNITUDE, is_adapter
from meshwright.model.initialise import ROWS_PER_DRAW
from meshwright.parallel.shard_index import ShardIndex
from meshwright.parallel.weights import Weights


def fill(weights: Weights, shape: Model, seed: int, apart: Container[str] = ()) -> None:
    """Give every master, and what is not trained, its own rows and columns; any other layout gives the same values.

    They are drawn, or read from the folder the model starts from. Those named in `apart` get theirs elsewhere.
    """
    tensors = {name: master.detach() for name, master in weights.masters.items()} | dict(weights.frozen)
    shards = weights.shards() | dict(weights.frozen_shards)
    rows_of = _with_adapters(shape, seed, shards)

    def put(run: tuple[str, Tensor, slice]) -> None:
        name, target, rows = run
        values = rows_of(name, shards[name].shape, rows)
        columns = shards[name].columns
        target.copy_(values if columns is None else values[:, columns])

    runs = [run for name, tensor in tensors.items() if name not in apart for run in _runs(name, tensor, shards[name])]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(put, runs))


def fill_preferences(model: nn.Module, shape: Model) -> None:
    """Give routers the preferences of the folder that a job starts from; without one they have none yet."""
    folder = start_folder(shape)
    preferences_LN = None if folder is None else HfWeights(folder, shape).preferences()
    if preferences_LN is not None:
        for layer, router in routers(model):
            router.preference.copy_(preferences_LN[layer])


def _with_adapters(shape: Model, seed: int, shards: Mapping[str, ShardIndex]) -> Rows:
    """The first values of the model and of its adapters: as saved, or drawn, or the lengths of the weights' rows."""
    base, adapter = first_rows(shape, seed), shape.adapter
    saved = None if adapter is None or adapter.init_from is None else PeftAdapter(Path(adapter.init_from), shape)

    def rows_of(name: str, size: tuple[int, ...], rows: slice) -> Tensor:
        if not is_adapter(name):
            return base(name, size, rows)
        if saved is not None:
            return saved.rows(name, size, rows)
        if not name.endswith(MAGNITUDE):
            return initial_rows(shape, name, size, seed, rows)
        weight = f"{name.removesuffix(MAGNITUDE)}weight"
        lengths: Tensor = base(weight, shards[weight].shape, rows).float().norm(dim=1)
        return lengths

    return rows_of


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
