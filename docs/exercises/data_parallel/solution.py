"""Exercise 2, done: each rank divides by the labels of both, and gradients are summed."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from toy import IGNORED, Batch, ToyGPT


def train(model: ToyGPT, batches: Sequence[Batch], rate: float) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for tokens, labels in batches:
        mine, targets = tokens.chunk(ranks)[rank], labels.chunk(ranks)[rank]
        count = (targets != IGNORED).sum()
        dist.all_reduce(count)
        loss = model(mine, targets) / count
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item())
    return losses
