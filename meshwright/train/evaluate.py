"""Held-out loss: the mean over every valid token of the same batches each time."""

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.data import Batch


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> float:
    """Mean loss per valid token over the batches, in the model's evaluation mode (no dropout)."""
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in batches:
        count += batch.valid_count()
        batch = batch.to(device)
        loss_sum = model(batch.tokens_BS, batch.labels_BS, 1, positions=batch.positions_BS, documents=batch.documents())
        total += loss_sum.double()
    return float(total) / max(1, count)
