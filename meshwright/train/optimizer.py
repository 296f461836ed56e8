"""AdamW over the master weights: decay on matrices only, one global gradient norm."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.job import Job


def build_optimizer(masters: dict[str, nn.Parameter], job: Job) -> torch.optim.Optimizer:
    """The job's optimizer over named master weights; norms, biases and other vectors are never decayed."""
    settings = job.optimizer
    matrices = [p for p in masters.values() if p.dim() >= 2]
    vectors = [p for p in masters.values() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(masters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """The global gradient norm before clipping; gradients are scaled down to the limit where it is over (0: never)."""
    parameters = list(masters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
