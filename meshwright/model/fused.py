"""Projections of the same input as one product: fewer, larger products, and one gradient of the input instead of a sum.

The weights stay separate, each under its own name; concatenating them takes a thousandth of the product's time.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.adapter import AdaptedLinear
from meshwright.model.dropout import Draws


def fused_projections(x: Tensor, linears: Sequence[nn.Linear], draws: Draws | None = None) -> Sequence[Tensor]:
    """Each linear applied to x; all of them have biases, or none."""
    return torch.split(fused_product(x, linears, draws), [linear.out_features for linear in linears], dim=-1)


def fused_product(x: Tensor, linears: Sequence[nn.Linear], draws: Draws | None = None) -> Tensor:
    """The same, concatenated; adapters, which add to the product, are applied one by one."""
    weight = torch.cat([linear.weight for linear in linears])
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    multiply = getattr(linears[0], "multiply", F.linear)  # linears with their own kind of product define this
    product: Tensor = multiply(x, weight, torch.cat(biases) if biases else None)
    if not any(isinstance(linear, AdaptedLinear) for linear in linears):
        return product
    updates = [
        linear.update(x, draws)
        if isinstance(linear, AdaptedLinear)
        else product.new_zeros(*product.shape[:-1], linear.out_features)
        for linear in linears
    ]
    return product + torch.cat(updates, dim=-1)
