"""The weights that are not trained, next to adapters or as a part of a model that reads pictures: where they come from,
and how a checkpoint knows them again.

A checkpoint does not contain them: they are drawn by the seed, or read from the folder the job starts from.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.hf_read import HfWeights, parameter_sizes
from meshwright.checkpoint.reading import Checkpoint
from meshwright.checkpoint.whisper import WhisperEncoder
from meshwright.errors import UserError
from meshwright.job import Model, fetch_start, start_folder
from meshwright.job.adapter import is_quantised
from meshwright.job.encoder import encoder_part
from meshwright.model import initial_rows
from meshwright.model.quantised import Packed, finish, quantise_rows

Rows = Callable[[str, tuple[int, ...], slice], Tensor]
"""Some rows of a parameter, by its name and whole size."""
_ROWS = 512
"""Quantised at a time; rows are drawn in blocks of as many."""


def first_rows(shape: Model, seed: int) -> Rows:
    """The weights a model starts with, without its adapters."""

    def drawn(name: str, size: tuple[int, ...], rows: slice) -> Tensor:
        return initial_rows(shape, name, size, seed, rows)

    folder, decoder = start_folder(shape), drawn
    if folder is not None:
        fetch_start(shape)  # `train` has; other callers have not, and each machine has its own cache
        decoder = HfWeights(folder, shape).rows
    if shape.audio is None:
        return decoder
    listening = whisper_start(shape)
    parts = {"decoder": decoder, "projector": drawn, "encoder": drawn if listening is None else listening.rows}
    return lambda name, size, rows: parts[encoder_part(name)](name, size, rows)


def whisper_start(shape: Model) -> WhisperEncoder | None:
    """The folder that an encoder of sound starts from; None if its weights are random."""
    audio = shape.audio
    return None if audio is None or audio.init_from is None else WhisperEncoder(Path(audio.init_from), shape)


def frozen_rows(shape: Model, seed: int) -> Rows:
    """The weights next to a model's adapters, without those: as they are stored, if that is in fewer bits."""
    base, pack = first_rows(shape.base, seed), packed_weights(shape, seed)

    @lru_cache(maxsize=1)
    def made(name: str) -> Tensor:
        return pack(name, torch.device("cpu")).weight()

    def rows_of(name: str, size: tuple[int, ...], rows: slice) -> Tensor:
        return made(name)[rows] if is_quantised(shape, name) else base(name, size, rows)

    return rows_of


def packed_weights(shape: Model, seed: int) -> Callable[[str, torch.device], Packed]:
    """Projections by name as the shape's adapter stores them, on a device: as the folder has them that the model starts
    from, if that is in the same format, else quantised there, some rows at a time."""
    folder, sizes, rows_of = start_folder(shape), parameter_sizes(shape.base), first_rows(shape.base, seed)
    stored = None if folder is None else HfWeights(folder, shape)
    format_ = "" if shape.adapter is None else shape.adapter.base

    @torch.no_grad()
    def packed(name: str, device: torch.device) -> Packed:
        size = sizes[name]
        found = None if stored is None else stored.packed(name, size, format_)
        if found is not None:
            return found.to(device)

        def some(start: int) -> tuple[Tensor, Tensor]:
            rows = rows_of(name, size, slice(start, min(start + _ROWS, size[0])))
            return quantise_rows(rows.to(device), format_)

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            codes, scales = zip(*pool.map(some, range(0, size[0], _ROWS)), strict=True)
        return finish(torch.cat(codes), torch.cat(scales), format_)

    return packed


def base_fingerprint(shape: Model, seed: int) -> str:
    """What tells the weights that are not trained from others; empty if all are trained."""
    if not shape.freezes:
        return ""
    folder = start_folder(shape)
    if folder is not None:
        fetch_start(shape)
        found = HfWeights(folder, shape).fingerprint()
    else:
        described = shape.base.model_dump_json(exclude={"dropout", "loss", "audio"})
        found = hashlib.sha256(f"{seed} {described}".encode()).hexdigest()
    if shape.audio is None:
        return found
    listening = whisper_start(shape)
    heard = "" if listening is None else listening.fingerprint()
    described = shape.audio.model_dump_json(exclude={"init_from"})
    return hashlib.sha256(f"{found} {seed} {described} {heard}".encode()).hexdigest()


def require_base(checkpoint: Checkpoint, shape: Model, fingerprint: str) -> None:
    """Refuse weights that were trained next to others than those of this fingerprint, which the shape has."""
    if checkpoint.facts.base != fingerprint:
        source = "run.seed" if shape.init_from is None else f'model.init_from = "{shape.init_from}"'
        if shape.audio is not None and shape.audio.init_from is not None:
            source += f' and model.audio.init_from = "{shape.audio.init_from}"'
        raise UserError(
            f"{checkpoint.path} was trained next to other weights than those of {source}; give the weights it was "
            "trained with"
        )
