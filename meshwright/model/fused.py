"""Projections of the same input as one product: fewer, larger products, and one gradient of the input instead of a sum.

The weights stay separate, each under its own name. Where they do not lie side by side in memory they are concatenated,
which takes a thousandth of the product's time.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.adapted import adapted_product
from meshwright.model.adapter import AdaptedLinear
from meshwright.model.dropout import Draws
from meshwright.model.quantised_linear import base_product, storage_of
from meshwright.torch_private.autograd import takes_context


def fused_projections(
    x: Tensor, linears: Sequence[nn.Linear], draws: Draws | None = None, joined: Tensor | None = None
) -> Sequence[Tensor]:
    """Each linear applied to x; all of them have biases, or none."""
    return torch.split(fused_product(x, linears, draws, joined), [linear.out_features for linear in linears], dim=-1)


def fused_product(
    x: Tensor, linears: Sequence[nn.Linear], draws: Draws | None = None, joined: Tensor | None = None
) -> Tensor:
    """The same, concatenated; adapters with dropout, which add to the product, are applied one by one. `joined` is one
    tensor of which the linears' weights are consecutive rows."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    product: Tensor
    if joined is not None:
        weights = [linear.weight for linear in linears]
        product = _JoinedProduct.apply(x, joined, bias, *weights)  # type: ignore[no-untyped-call]
        return product
    with_adapters = [linear for linear in linears if isinstance(linear, AdaptedLinear)]
    if with_adapters and with_adapters[0].adds_up(draws):
        product = adapted_product(x, linears, with_adapters[0].scale)
        return product if bias is None else product + bias
    if storage_of(linears[0]) is not None:
        product = base_product(linears, x) if bias is None else base_product(linears, x) + bias
    elif not any(linear.weight.requires_grad for linear in linears):
        product = _frozen_product(x, bias, *[linear.weight for linear in linears])
    else:
        multiply = getattr(linears[0], "multiply", F.linear)  # linears with their own kind of product define this
        product = multiply(x, torch.cat([linear.weight for linear in linears]), bias)
    if not with_adapters:
        return product
    updates = [
        linear.update(x, draws)
        if isinstance(linear, AdaptedLinear)
        else product.new_zeros(*product.shape[:-1], linear.out_features)
        for linear in linears
    ]
    return product + torch.cat(updates, dim=-1)


def _frozen_product(x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
    product: Tensor = _FrozenProduct.apply(x, bias, *weights)  # type: ignore[no-untyped-call]
    return product


class _FrozenProduct(torch.autograd.Function):
    """x times several frozen weights at once; the backward multiplies with each, so that their concatenation need not
    be kept: without gradients of weights it would be all that is."""

    @staticmethod
    @takes_context
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return F.linear(x, torch.cat(weights), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        weights = ctx.saved_tensors
        parts = torch.split(gradient, [weight.shape[0] for weight in weights], dim=-1)
        total = parts[0] @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            total = total + part @ weight
        return (total, None, *(None for _ in weights))


class _JoinedProduct(torch.autograd.Function):
    """x times several weights that are rows of one tensor; gradients are the weights' own."""

    @staticmethod
    @takes_context
    def forward(ctx: Any, x: Tensor, joined: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, joined)
        ctx.rows, ctx.biased = [weight.shape[0] for weight in weights], bias is not None
        return F.linear(x, joined, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, joined = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        grad_joined, grad_bias = rows.t() @ x.flatten(0, -2), rows.sum(0) if ctx.biased else None
        return (gradient @ joined, None, grad_bias, *torch.split(grad_joined, ctx.rows))
