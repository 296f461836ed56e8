"""An optimizer's states as boxes of whole tensors: what a checkpoint holds of them, and how they come back.

A state is like its parameter (a moment: cut as the parameter is), a row of scales for blocks of columns (8 bits), or
something every holder has whole (a count of steps, Adafactor's means).
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.checkpoint import Checkpoint, Part
from meshwright.errors import UserError
from meshwright.parallel import Piece
from meshwright.train.optimizer.build import Optimizer, parts_of, states_of
from meshwright.train.optimizer.states import block_length

SCALES = ".scales"


class Place(NamedTuple):
    """Where a rank's state tensor lies: the name and shape of the whole, and this rank's box of it."""

    name: str
    shape: tuple[int, ...]
    box: tuple[slice, ...]


def saved_states(
    optimizer: Optimizer, masters: Mapping[str, nn.Parameter], pieces: Mapping[str, Piece], owned: Collection[str]
) -> list[Part]:
    """The states of the parameters this rank saves; what every holder has whole, the first of them saves."""
    parts = []
    for name, states in states_of(optimizer, masters).items():
        piece = pieces[name]
        for key, values in states.items() if name in owned else ():
            cut = key.endswith(SCALES) or (values.shape == masters[name].shape and values.dim() > 0)
            place = _place(name, key, piece, tuple(piece.shape if cut else values.shape), cut)
            if cut:
                rows = place.box[0].stop - place.box[0].start
                parts.append(Part(place.name, place.shape, _starts(place.box), values[:rows]))
            elif all(span.start == 0 < span.stop for span in piece.box()):
                parts.append(Part(place.name, place.shape, (0,) * values.dim(), values))
    return [part for part in parts if part.values.numel()]


def restore_states(
    optimizer: Optimizer, masters: Mapping[str, nn.Parameter], pieces: Mapping[str, Piece], checkpoint: Checkpoint
) -> None:
    """Give an optimizer the states a checkpoint holds of this rank's parameters, whatever layout saved them."""
    owners = {master: part for part in parts_of(optimizer) for group in part.param_groups for master in group["params"]}
    found: dict[str, list[str]] = {}
    for full in checkpoint.names("optimizer/"):
        name, _, key = full.removeprefix("optimizer/").rpartition("/")
        found.setdefault(name, []).append(key)
    for name, master in masters.items():
        state = owners[master].state[master]
        for saved_key in found.get(name, ()):
            key = saved_key.partition("@")[0]
            values = _read(checkpoint, name, saved_key, key, master, pieces[name])
            # Torch's fused AdamW counts steps on the device, the others count on the host.
            on_host = values.dim() == 0 and not isinstance(owners[master], torch.optim.AdamW)
            state[key] = values if on_host else values.to(master.device)


def _read(checkpoint: Checkpoint, name: str, saved_key: str, key: str, master: nn.Parameter, piece: Piece) -> Tensor:
    full = f"optimizer/{name}/{saved_key}"
    shape = checkpoint.shape(full)
    if not key.endswith(SCALES) and shape != piece.shape:
        return checkpoint.whole(full)
    place = _place(name, key, piece, piece.shape, True)
    if place.name != full:
        saved, own = (part.partition("@")[2] or "1" for part in (full, place.name))
        raise UserError(
            f'precision.optimizer_states = "int8": {name} was saved with blocks cut by layout.tp = {saved}, which do '
            f"not fit those of layout.tp = {own}; resume with the layout.tp it was saved with"
        )
    values = checkpoint.read(full, place.box)
    padding = master.shape[0] - values.shape[0]
    return torch.cat([values, values.new_zeros(padding, *values.shape[1:])]) if padding else values


def _place(name: str, key: str, piece: Piece, shape: tuple[int, ...], cut: bool) -> Place:
    full = f"optimizer/{name}/{key}"
    if not cut:
        return Place(full, shape, tuple(slice(0, size) for size in shape))
    box = piece.box()
    if not key.endswith(SCALES):
        return Place(full, shape, box)
    rows, columns = box
    block, width = block_length(shape[1]), columns.stop - columns.start
    if columns.start % block == 0 and (columns.stop % block == 0 or columns.stop == shape[1]):
        own = slice(columns.start // block, -(-columns.stop // block))
        return Place(full, (shape[0], -(-shape[1] // block)), (rows, own))
    # A rank's first block begins where its columns do: such scales fit a layout that cuts the columns alike, no other.
    cuts, each = shape[1] // width, -(-width // block)
    own = slice(columns.start // width * each, (columns.start // width + 1) * each)
    return Place(f"{full}@{cuts}", (shape[0], cuts * each), (rows, own))


def _starts(box: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(span.start for span in box)
