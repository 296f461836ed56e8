"""Frozen projections of one input with their adapters, in few passes over memory: for compiled blocks.

An update of low rank costs next to no FLOPs, but it is as large as the projection's result. Left to the compiler it is
written, read and added; in the backward the same happens to every contribution to the input's gradient, and scaling
copies the whole gradient once more. On paper that is 2.5 ms a block of Llama-3-8B on an H200 with 8192 tokens; here,
where products are added to what is there, 1 ms (the block's large products take 10). Weights stay apart: their
concatenation would be a copy of them in every forward. No gradient of a weight is computed, and none of an input that
needs none.

N tokens, I inputs, O outputs of all projections, R ranks of all adapters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.quantised_linear import Kind, kind_of, made, made_again, stored
from meshwright.torch_private.autograd import takes_context


def adapted_product(x_BSI: Tensor, linears: Sequence[nn.Linear], scale: float) -> Tensor:
    """x · Wᵀ + scale · x · Aᵀ · Bᵀ for every projection, without biases; some may have no A and B."""
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    for linear in linears:
        a, b = getattr(linear, "lora_a", None), getattr(linear, "lora_b", None)
        downs += [] if a is None else [a]
        ups.append(x_BSI.new_empty(linear.out_features, 0) if b is None else b)
    kinds = tuple([kind_of(linear) for linear in linears])
    tensors = [tensor for linear in linears for tensor in stored(linear)]
    a_RI = downs[0] if len(downs) == 1 else torch.cat(downs)
    out_BSO: Tensor = _Adapted.apply(  # type: ignore[no-untyped-call]
        x_BSI, a_RI, kinds, scale, x_BSI.requires_grad, *ups, *tensors
    )
    return out_BSO


class _Adapted(torch.autograd.Function):
    @staticmethod
    @takes_context
    def forward(
        ctx: Any, x_BSI: Tensor, a_RI: Tensor, kinds: tuple[Kind, ...], scale: float, with_input: bool, *tensors: Tensor
    ) -> Tensor:
        ctx.kinds, ctx.scale, ctx.with_input = kinds, scale, with_input
        ups, codes = tensors[: len(kinds)], tensors[len(kinds) :]
        x_NI = x_BSI.flatten(0, -2)
        low_NR = low_rank(x_NI, a_RI, scale)
        ctx.save_for_backward(x_BSI, low_NR, a_RI, *tensors)
        out_NO: Tensor = adapted(x_NI, low_NR, made(codes, kinds, x_BSI.dtype), list(ups))
        return out_NO.view(*x_BSI.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient_BSO: Tensor) -> tuple[Any, ...]:
        x_BSI, low_NR, a_RI, *tensors = ctx.saved_tensors
        ups, codes = tensors[: len(ctx.kinds)], tensors[len(ctx.kinds) :]
        gradient_NO = gradient_BSO.flatten(0, -2)
        # Without the input's gradient no weight is needed.
        weights = made_again(codes, ctx.kinds, gradient_NO) if ctx.with_input else []
        results = adapted_backward(gradient_NO, x_BSI.flatten(0, -2), low_NR, a_RI, weights, ups, ctx.scale)
        # By place: the compiler of torch 2.11 takes what a starred name gets for a tuple, and stops where it changes.
        x = results[-1].view(x_BSI.shape) if ctx.with_input else None
        of_ups = [results[1 + n] for n in range(len(ups))]
        return (x, results[0], None, None, None, *of_ups, *(None for _ in codes))


@torch.library.custom_op("meshwright::low_rank", mutates_args=())
def low_rank(x_NI: Tensor, a_RI: Tensor, scale: float) -> Tensor:
    """scale · x · Aᵀ of all adapters of an input."""
    return (x_NI @ a_RI.t()).mul_(scale)


@low_rank.register_fake
def _(x_NI: Tensor, a_RI: Tensor, scale: float) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], a_RI.shape[0])


@torch.library.custom_op("meshwright::adapted", mutates_args=())
def adapted(x_NI: Tensor, low_NR: Tensor, weights: Sequence[Tensor], ups: Sequence[Tensor]) -> Tensor:
    """x · Wᵀ + low · Bᵀ for every projection; one without an adapter has a B without columns."""
    out_NO = x_NI.new_empty(x_NI.shape[0], sum(weight.shape[0] for weight in weights))
    outs, lows = _by_projection(out_NO, low_NR, ups)
    for weight, up, out, low in zip(weights, ups, outs, lows, strict=True):
        if up.shape[1]:
            # The small product is written, and the large one added to it as it is made.
            torch.mm(low, up.t(), out=out)
            out.addmm_(x_NI, weight.t())
        else:
            torch.mm(x_NI, weight.t(), out=out)
    return out_NO


@adapted.register_fake
def _(x_NI: Tensor, low_NR: Tensor, weights: Sequence[Tensor], ups: Sequence[Tensor]) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], sum(weight.shape[0] for weight in weights))


@torch.library.custom_op("meshwright::adapted_backward", mutates_args=())
def adapted_backward(
    gradient_NO: Tensor,
    x_NI: Tensor,
    low_NR: Tensor,
    a_RI: Tensor,
    weights: Sequence[Tensor],
    ups: Sequence[Tensor],
    scale: float,
) -> list[Tensor]:
    """The gradients of A and of every B, and that of the input if there are weights."""
    gradients, lows = _by_projection(gradient_NO, low_NR, ups)
    grad_low_NR = torch.empty_like(low_NR)
    for gradient, up, grad_low in zip(gradients, ups, _by_projection(gradient_NO, grad_low_NR, ups)[1], strict=True):
        torch.mm(gradient, up, out=grad_low)
    grad_low_NR.mul_(scale)
    results = [grad_low_NR.t() @ x_NI]
    results += [gradient.t() @ low for gradient, low in zip(gradients, lows, strict=True)]
    if weights:
        grad_x_NI = grad_low_NR @ a_RI
        for gradient, weight in zip(gradients, weights, strict=True):
            grad_x_NI.addmm_(gradient, weight)
        results.append(grad_x_NI)
    return results


@adapted_backward.register_fake
def _(
    gradient_NO: Tensor,
    x_NI: Tensor,
    low_NR: Tensor,
    a_RI: Tensor,
    weights: Sequence[Tensor],
    ups: Sequence[Tensor],
    scale: float,
) -> list[Tensor]:
    like = torch.empty_like
    results = [like(each, memory_format=torch.contiguous_format) for each in (a_RI, *ups)]
    return [*results, like(x_NI, memory_format=torch.contiguous_format)] if weights else results


def _by_projection(wide_NO: Tensor, low_NR: Tensor, ups: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The columns that belong to each projection, and to its adapter."""
    outputs, ranks = [up.shape[0] for up in ups], [up.shape[1] for up in ups]
    return torch.split(wide_NO, outputs, dim=-1), torch.split(low_NR, ranks, dim=-1)
