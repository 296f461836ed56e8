"""A mixture of experts: tokens sorted by expert, every expert's product over its own tokens, results put back.

B batch, S sequence, D width, F an expert's inner width, N experts, K experts of a token, T tokens (B × S), R rows: a
token once for each of its experts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.job.experts import Experts
from meshwright.model.capacity import Slots
from meshwright.model.router import Router, Routing, as_it_is
from meshwright.model.swiglu import swiglu

Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows sorted by expert and the number of rows of each expert, to the experts' results for these rows."""
Dispatch = Callable[[Tensor, Tensor, Compute], Tensor]
"""Rows sorted by expert and their number for each expert, to the results: computed here, or where the experts are."""


class MixtureOfExperts(nn.Module):
    """Sends every token to its experts and adds their results, weighted."""

    def __init__(self, shape: Model, experts: Experts) -> None:
        super().__init__()
        self.router = Router(shape.width, experts, bias=shape.linear_bias)
        self.experts = ExpertWeights(shape.width, experts, bias=shape.linear_bias)
        self.dispatch: Dispatch = here
        self.dispatch_even: Dispatch = here
        """For equally many rows of every expert, on every rank."""

    def forward(self, x_BSD: Tensor, replayed_BSK: Tensor | None = None) -> Tensor:
        routing: Routing = self.router(x_BSD, replayed_BSK)
        order, dispatch = self._order(routing)
        rows_RD = order.rows(x_BSD.flatten(0, 1))
        out_RD = dispatch(rows_RD, order.counts_N, self.experts)
        return order.combined(out_RD, routing.weights_BSK.flatten(0, 1)).view_as(x_BSD)

    def _order(self, routing: Routing) -> "tuple[SortedByExpert | Slots, Dispatch]":
        """How tokens become rows, and how these get to the experts."""
        queued = self.router.queued(routing)
        self.router.count(routing, queued)
        if queued is None:
            return SortedByExpert(routing.chosen_BSK.flatten(0, 1), routing.counts_BN.sum(0)), self.dispatch
        return Slots(routing.chosen_BSK, queued, self.router.experts.count), self.dispatch_even


class SortedByExpert:
    """The order in which tokens are handed to experts: by expert, tokens of one expert in their own order."""

    def __init__(self, chosen_TK: Tensor, counts_N: Tensor) -> None:
        self._tokens, self._top_k = chosen_TK.shape
        flat = chosen_TK.flatten()
        self._order = flat.argsort(stable=True)
        self._place = torch.empty_like(self._order)
        self._place[self._order] = torch.arange(len(flat), device=flat.device)
        self.counts_N = counts_N
        """Rows of each expert."""

    def rows(self, x_TD: Tensor) -> Tensor:
        """Every token once for each of its experts, sorted by expert."""
        rows_RD: Tensor = _Spread.apply(x_TD, self._order, self._place, self._top_k)  # type: ignore[no-untyped-call]
        return rows_RD

    def combined(self, out_RD: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's results, added up in the weights' format."""
        by_token_TKD = permuted(out_RD, self._place, self._order).view(self._tokens, self._top_k, -1)
        return (by_token_TKD * weights_TK.unsqueeze(-1)).sum(1).to(out_RD.dtype)


class _Spread(torch.autograd.Function):
    """Rows gathered; the gradient is a gather and a sum too, so that its order never depends on timing."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x_TD[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        [place] = ctx.saved_tensors
        return grad[place].view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order; the gradient is put back by the inverse order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        [inverse] = ctx.saved_tensors
        return grad[inverse], None, None


def permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows in another order, given its inverse too."""
    result: Tensor = _Permuted.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return result


class ExpertWeights(nn.Module):
    """The experts' weights, each kind packed into one matrix: expert after expert along its rows."""

    def __init__(self, width: int, experts: Experts, *, bias: bool = False) -> None:
        super().__init__()
        self.ffn_width, self.swiglu_limit = experts.ffn_width, experts.swiglu_limit
        self.gate_up = PackedLinear(experts.count, width, 2 * experts.ffn_width, bias=bias)
        self.down = PackedLinear(experts.count, experts.ffn_width, width, bias=bias)

    def forward(self, rows_RD: Tensor, counts_N: Tensor) -> Tensor:
        """silu(gate) × up and down, every expert for its own rows; the rows are sorted by expert."""
        gate_up = self.gate_up(rows_RD, counts_N)
        inner_RF = swiglu(gate_up) if self.swiglu_limit is None else _clamped_swiglu(gate_up, self.swiglu_limit)
        out_RD: Tensor = self.down(inner_RF, counts_N)
        return out_RD


def _clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """gpt-oss's gate: as `swiglu`, of clamped inputs, with a steeper sigmoid, and 1 added to up."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class PackedLinear(nn.Module):
    """One projection of every expert; a rank may hold only some of them."""

    def __init__(self, count: int, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.outputs = outputs
        self.own: Callable[[Tensor], Tensor] = as_it_is
        """The part of the weights with this rank's experts."""
        self.weight = nn.Parameter(torch.empty(count * outputs, inputs))
        self.bias = nn.Parameter(torch.empty(count * outputs)) if bias else None

    def forward(self, rows: Tensor, counts_N: Tensor) -> Tensor:
        weights_NOI = self.own(self.weight).view(-1, self.outputs, self.weight.shape[1])
        together = rows.is_cuda and rows.dtype == torch.bfloat16
        products: Tensor = (products_together if together else products_one_by_one)(rows, weights_NOI, counts_N)
        if self.bias is None:
            return products
        biases_NO = self.own(self.bias).view(-1, self.outputs).to(products.dtype)
        return products + biases_NO.repeat_interleave(counts_N, dim=0, output_size=len(rows))


def products_together(rows: Tensor, weights_NOI: Tensor, counts_N: Tensor) -> Tensor:
    """Every expert's product with its own rows, in one kernel: for 16-bit numbers on a GPU, where the host never waits
    for the counts."""
    return F.grouped_mm(rows, weights_NOI.transpose(1, 2), offs=counts_N.cumsum(0, dtype=torch.int32))


def products_one_by_one(rows: Tensor, weights_NOI: Tensor, counts_N: Tensor) -> Tensor:
    """The same, one expert at a time, in any format."""
    # Experts without rows take part, so that their gradients exist: ranks reduce them together.
    pairs = zip(torch.split(rows, counts_N.tolist()), weights_NOI.unbind(0), strict=True)
    return torch.cat([F.linear(own, weight) for own, weight in pairs])


def here(rows_RD: Tensor, counts_N: Tensor, compute: Compute) -> Tensor:
    """All experts are on this device."""
    return compute(rows_RD, counts_N)
