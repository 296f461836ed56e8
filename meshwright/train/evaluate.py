"""Held-out loss: the mean over every valid token of the same batches each time, shared out over data-parallel ranks."""

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.data import Batch
from meshwright.parallel import World


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], world: World) -> float:
    """Mean loss per valid token over the batches, without dropout; the same on every rank."""
    everyones = list(batches)
    total, count = torch.zeros((), dtype=torch.float64, device=world.device), 0
    for first in range(0, len(everyones), world.data_ranks):
        turn = everyones[first : first + world.data_ranks]
        counts = world.data_rank < len(turn)
        # Sharded parameters are gathered together: a rank without a batch of its own keeps step on another's.
        batch = turn[world.data_rank] if counts else turn[0]
        here = batch.to(world.device)
        loss_sum = model(here.tokens_BS, here.labels_BS, 1, positions=here.positions_BS, documents=here.documents())
        if counts:
            total += loss_sum.double()
            count += batch.valid_count()
    # Tensor-parallel ranks repeat both sums alike, which leaves the quotient as it is.
    loss_total, valid_total = world.sum_over_world([total, count])
    return loss_total / max(1.0, valid_total)
