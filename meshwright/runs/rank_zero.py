"""Rank 0 acts for all ranks, and shares the result with all."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.parallel import World

T = TypeVar("T")


class SharedRefusal(UserError):
    """A user error that every rank knows about; rank 0 reports it for all."""


def on_rank_zero(world: World, action: Callable[[], T]) -> T | None:
    """Run a function on rank 0 while the others wait; a UserError there is raised on every rank, so that none hangs."""
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


def from_rank_zero(world: World, value: T) -> T:
    """Rank 0's value, on every rank."""
    if world.size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
