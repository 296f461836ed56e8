"""Exercise 3, done: the averaging of fully_shard is switched off, since the loss is divided once by all labels."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import IGNORED, Batch, ToyGPT


def train(model: ToyGPT, batches: Sequence[Batch], rate: float) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh).set_gradient_divide_factor(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for tokens, labels in batches:
        mine, targets = tokens.chunk(ranks)[rank], labels.chunk(ranks)[rank]
        count = (targets != IGNORED).sum()
        dist.all_reduce(count)
        loss = model(mine, targets) / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item())
    return losses
