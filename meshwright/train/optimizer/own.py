"""Optimizers of users' own: how they are made over a rank's masters, and what they keep held to what they declare."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.registries import OPTIMIZERS


def build_own(job: Job, masters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the user's own over this rank's masters: matrices with decay, vectors without.

    Beside the rate and optimizer.settings it is given those of the section's fields that its constructor has.
    """
    made, settings = OPTIMIZERS.find(job.optimizer.name), job.optimizer
    asked = inspect.signature(made).parameters
    fields = {"betas": settings.betas, "momentum": settings.momentum, "eps": settings.eps}
    given = {name: value for name, value in fields.items() if name in asked} | settings.settings
    groups = [
        {"params": [p for p in masters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in masters if p.dim() < 2], "weight_decay": 0.0},
    ]
    try:
        optimizer = made([group for group in groups if group["params"]], lr=settings.lr, **given)
    except TypeError as error:
        raise UserError(
            f'optimizer.settings = {settings.settings} cannot be given to optimizer.name = "{settings.name}" '
            f"({error}); correct them"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f'optimizer.name = "{settings.name}" makes no torch.optim.Optimizer; derive its class from it')
    return optimizer


def require_declared(
    optimizer: Any, masters: Mapping[str, nn.Parameter], states: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse states of a user's own optimizer that a checkpoint could not hold or would not miss."""
    made = type(optimizer).__name__
    for name, kept in states.items():
        for key, values in kept.items():
            if not isinstance(values, Tensor):
                raise UserError(
                    f'the optimizer {made} keeps "{key}" as {type(values).__name__}, and a checkpoint holds tensors; '
                    "make it a tensor, as torch.tensor(0)"
                )
            if values.shape == masters[name].shape and values.dim() and key not in optimizer.states:
                raise UserError(
                    f'the optimizer {made} keeps "{key}" for every entry, and its states = {optimizer.states} do not '
                    "name it; add it there"
                )
