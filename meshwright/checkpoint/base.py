"""The weights that adapters are trained next to: where they come from, and how a checkpoint knows them again.

A checkpoint of adapters does not contain them: they are drawn by the seed, or read from the folder the job starts from.
"""

import hashlib
from collections.abc import Callable

from torch import Tensor

from meshwright.checkpoint.hf_read import HfWeights
from meshwright.checkpoint.reading import Checkpoint
from meshwright.errors import UserError
from meshwright.job import Model, fetch_start, start_folder
from meshwright.model import initial_rows

Rows = Callable[[str, tuple[int, ...], slice], Tensor]
"""Some rows of a parameter, by its name and whole size."""


def first_rows(shape: Model, seed: int) -> Rows:
    """The weights a model starts with, without its adapters."""
    folder = start_folder(shape)
    if folder is not None:
        fetch_start(shape)  # `train` has; other callers have not, and each machine has its own cache
        return HfWeights(folder, shape).rows
    return lambda name, size, rows: initial_rows(shape, name, size, seed, rows)


def base_fingerprint(shape: Model, seed: int) -> str:
    """What tells the weights next to a model's adapters from others; empty without adapters."""
    if shape.adapter is None:
        return ""
    folder = start_folder(shape)
    if folder is not None:
        fetch_start(shape)
        return HfWeights(folder, shape).fingerprint()
    return hashlib.sha256(f"{seed} {shape.base.model_dump_json(exclude={'dropout', 'loss'})}".encode()).hexdigest()


def require_base(checkpoint: Checkpoint, shape: Model, fingerprint: str) -> None:
    """Refuse adapters that were trained next to other weights than those of this fingerprint, which the shape has."""
    if checkpoint.facts.base != fingerprint:
        source = "run.seed" if shape.init_from is None else f'model.init_from = "{shape.init_from}"'
        raise UserError(
            f"{checkpoint.path} holds adapters of other weights than those of {source}; give the weights they were "
            "trained with"
        )
