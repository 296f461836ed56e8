"""AdamW over the master weights: decay on matrices only, one global gradient norm."""

from collections.abc import Iterable

import torch
from torch import nn

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


@torch.no_grad()
def clip_gradients(masters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients whose global norm is over the limit down to it; a limit of 0 leaves them alone."""
    if limit > 0 and not norm <= limit:
        torch._foreach_mul_([p.grad for p in masters if p.grad is not None], limit / (norm + 1e-6))
