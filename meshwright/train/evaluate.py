"""Held-out loss: the mean over every valid token of the same batches each time, shared out over data-parallel ranks."""

from collections.abc import Iterable

import torch

from meshwright.data import Batch
from meshwright.parallel import Engine, PipeDream, World


def evaluate(engine: Engine | PipeDream, batches: Iterable[Batch], world: World) -> float:
    """Mean loss per valid token over the batches, without dropout; the same on every rank."""
    everyones = list(batches)
    turns = [everyones[first : first + world.data_ranks] for first in range(0, len(everyones), world.data_ranks)]
    # Sharded parameters are gathered together: a rank without a batch of its own keeps step on another's.
    mine = [turn[world.data_rank] if world.data_rank < len(turn) else turn[0] for turn in turns]
    total, count = torch.zeros((), dtype=torch.float64, device=world.device), 0
    for turn, batch, loss_sum in zip(turns, mine, engine.held_out(mine), strict=True):
        if world.data_rank < len(turn):
            total += loss_sum.double()
            count += batch.valid_count()
    # Tensor-parallel ranks repeat the same loss; of all ranks that read the same tokens one counts them.
    loss_total, valid_total = world.sum_over_world([total / world.axis_size("tp"), count if world.leads_data else 0])
    return loss_total / max(1.0, valid_total)
