"""Rank 0 acts for all: what it may do alone, and the whole weights it gathers from everyone's pieces."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.parallel import Piece, Weights, World

T = TypeVar("T")


class SharedRefusal(UserError):
    """A user's mistake that every rank knows of; rank 0 tells it for all."""


def on_rank_zero(world: World, action: Callable[[], T]) -> T | None:
    """Do something on rank 0 while the others wait; a UserError there is raised on every rank, so that none hangs."""
    if world.size == 1:
        return action()
    result: T | None = None
    refusal: list[str | None] = [None]
    if world.rank == 0:
        try:
            result = action()
        except UserError as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise SharedRefusal(refusal[0])
    return result


@torch.no_grad()
def gather_weights(weights: Weights, world: World) -> dict[str, nn.Parameter]:
    """The whole masters in rank 0's host memory, one parameter after the other; nothing on the other ranks."""
    if world.size == 1:
        return weights.masters
    pieces = weights.pieces()
    # Replicas hold the same: those of the first one send.
    sends = world.axis_rank("dp_replicate") == 0
    everyone: list[dict[str, Piece]] = [{}] * world.size
    dist.gather_object(pieces if sends else {}, everyone if world.rank == 0 else None)
    if world.rank == 0:
        # Stages hold different parameters; each rank's own order is kept, since its messages come in that order.
        names = dict.fromkeys(name for held in everyone for name in held)
        return {name: nn.Parameter(_receive(name, weights.masters.get(name), everyone)) for name in names}
    for name, piece in pieces.items():
        if sends and _local_shape(piece)[0]:
            dist.send(weights.masters[name].detach().cpu().contiguous(), dst=0)
    return {}


def _receive(name: str, own: Tensor | None, everyone: list[dict[str, Piece]]) -> Tensor:
    holders = [(rank, pieces[name]) for rank, pieces in enumerate(everyone) if name in pieces]
    whole = torch.empty(holders[0][1].shape, dtype=torch.float32)
    for rank, piece in holders:
        if not _local_shape(piece)[0]:
            continue
        if rank == 0 and own is not None:
            local = own.detach().cpu()
        else:
            local = torch.empty(_local_shape(piece), dtype=torch.float32)
            dist.recv(local, src=rank)
        piece.put(whole, local)
    return whole


def _local_shape(piece: Piece) -> tuple[int, ...]:
    if piece.columns is None:
        return (len(piece.rows), *piece.shape[1:])
    return (len(piece.rows), len(piece.columns), *piece.shape[2:])
