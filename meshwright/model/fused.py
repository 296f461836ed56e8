"""Projections of the same input as one product: fewer, larger products, and one gradient of the input instead of a sum.

The weights stay separate, each under its own name; concatenating them takes a thousandth of the product's time.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fused_projections(x: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Each linear applied to x; all of them have biases, or none."""
    return torch.split(fused_product(x, linears), [linear.out_features for linear in linears], dim=-1)


def fused_product(x: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """The same, concatenated."""
    weight = torch.cat([linear.weight for linear in linears])
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    multiply = getattr(linears[0], "multiply", F.linear)  # linears with their own kind of product define this
    product: Tensor = multiply(x, weight, torch.cat(biases) if biases else None)
    return product
