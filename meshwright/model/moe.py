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
from meshwright.model.rows import gathered, has_kernels, summed, weighted_sum, weighted_swiglu
from meshwright.model.swiglu import swiglu

Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows sorted by expert and the number of rows of each expert, to the experts' results for these rows."""
Meanwhile = Callable[[], None]
"""What else there is to compute, called once: while rows travel, if they do."""
Dispatch = Callable[[Tensor, Tensor, Compute, Meanwhile], Tensor]
"""Rows sorted by expert and their number for each expert, to the results: computed here, or where the experts are."""


def nothing() -> None:
    """Nothing else to compute."""


class MixtureOfExperts(nn.Module):
    """Sends every token to its experts and adds their results, weighted."""

    def __init__(self, shape: Model, experts: Experts) -> None:
        super().__init__()
        self.router = Router(shape.width, experts, bias=shape.linear_bias)
        self.experts = ExpertWeights(shape.width, experts, bias=shape.linear_bias)
        self.dispatch: Dispatch = here
        self.dispatch_even: Dispatch = here
        """For equally many rows of every expert, on every rank."""

    def forward(self, x_BSD: Tensor, replayed_BSK: Tensor | None = None, meanwhile: Meanwhile = nothing) -> Tensor:
        routing: Routing = self.router(x_BSD, replayed_BSK)
        order, dispatch = self._order(routing)
        rows_RD = order.rows(x_BSD.flatten(0, 1))
        if isinstance(order, SortedByExpert) and self._weighs_inside(rows_RD):
            weighted_RD = self.experts(rows_RD, order.counts_N, (routing.weights_BSK.flatten(0, 1), order.order_R))
            meanwhile()
            return order.summed(weighted_RD).view_as(x_BSD)
        out_RD = dispatch(rows_RD, order.counts_N, self.experts, meanwhile)
        return order.combined(out_RD, routing.weights_BSK.flatten(0, 1)).view_as(x_BSD)

    def _order(self, routing: Routing) -> "tuple[SortedByExpert | Slots, Dispatch]":
        """How tokens become rows, and how these get to the experts."""
        queued = self.router.queued(routing)
        self.router.count(routing, queued)
        if queued is None:
            return SortedByExpert(routing.chosen_BSK.flatten(0, 1), routing.counts_BN.sum(0)), self.dispatch
        return Slots(routing.chosen_BSK, queued, self.router.experts.count), self.dispatch_even

    def _weighs_inside(self, rows_RD: Tensor) -> bool:
        """Whether weights are applied before the last product instead of after it: where this takes no pass over
        memory of its own, and the results need not be kept for the weights' gradient."""
        return has_kernels(rows_RD) and self.dispatch is here and self.experts.can_weigh


class SortedByExpert:
    """The order in which tokens are handed to experts: by expert, tokens of one expert in their own order."""

    def __init__(self, chosen_TK: Tensor, counts_N: Tensor) -> None:
        flat = chosen_TK.flatten().int()  # half as many digits to sort by
        self.order_R = flat.argsort(stable=True)
        """The slot of each row: token × K + place among the token's experts."""
        place = torch.empty_like(self.order_R)
        place[self.order_R] = torch.arange(len(flat), device=flat.device)
        self._place_TK = place.view_as(chosen_TK)
        self.counts_N = counts_N
        """Rows of each expert."""

    def rows(self, x_TD: Tensor) -> Tensor:
        """Every token once for each of its experts, sorted by expert."""
        return gathered(x_TD, self.order_R, self._place_TK)

    def summed(self, out_RD: Tensor) -> Tensor:
        """The sum of each token's results, which are weighted already."""
        return summed(out_RD, self.order_R, self._place_TK)

    def combined(self, out_RD: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's results, added up in the weights' format."""
        if has_kernels(out_RD):
            return weighted_sum(out_RD, weights_TK, self.order_R, self._place_TK)
        by_token_TKD = permuted(out_RD, self._place_TK.flatten(), self.order_R).view(*weights_TK.shape, -1)
        return (by_token_TKD * weights_TK.unsqueeze(-1)).sum(1).to(out_RD.dtype)


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

    @property
    def can_weigh(self) -> bool:
        """Whether weights can be given to the call: a bias after them would not be weighted."""
        return self.swiglu_limit is None and self.down.bias is None

    def forward(self, rows_RD: Tensor, counts_N: Tensor, weights: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """silu(gate) × up and down, every expert for its own rows; the rows are sorted by expert.

        `weights`, of each token's experts, come with each row's place among them, and are multiplied to the results.
        """
        gate_up = self.gate_up(rows_RD, counts_N)
        if weights is not None:
            inner_RF = weighted_swiglu(gate_up, *weights)
        else:
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
        together = rows.is_cuda and rows.dtype == torch.bfloat16 and fit_one_kernel(weights_NOI)
        products: Tensor = (products_together if together else products_one_by_one)(rows, weights_NOI, counts_N)
        if self.bias is None:
            return products
        biases_NO = self.own(self.bias).view(-1, self.outputs).to(products.dtype)
        return products + biases_NO.repeat_interleave(counts_N, dim=0, output_size=len(rows))


def fit_one_kernel(weights_NOI: Tensor) -> bool:
    """Whether torch's grouped product takes these: fewer than 1024 groups, rows of whole 16 bytes."""
    experts, *sides = weights_NOI.shape
    return experts < 1024 and all(side % 8 == 0 for side in sides)


def products_together(rows: Tensor, weights_NOI: Tensor, counts_N: Tensor) -> Tensor:
    """Every expert's product with its own rows, in one kernel: for 16-bit numbers on a GPU, where the host never waits
    for the counts."""
    products: Tensor = _Together.apply(rows, weights_NOI, counts_N)  # type: ignore[no-untyped-call]
    return products


class _Together(torch.autograd.Function):
    """Groups of rows may have any length as long as memory is contiguous across them: in all three products."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weights_NOI: Tensor, counts_N: Tensor) -> Tensor:
        ends_N = counts_N.cumsum(0, dtype=torch.int32)
        ctx.save_for_backward(rows_RI, weights_NOI, ends_N)
        return F.grouped_mm(rows_RI, weights_NOI.transpose(1, 2), offs=ends_N)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RI, weights_NOI, ends_N = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad_RO, weights_NOI, offs=ends_N)
        if ctx.needs_input_grad[1]:
            grad_weights = F.grouped_mm(grad_RO.t(), rows_RI, offs=ends_N)
            if grad_RO.is_cuda and torch.cuda.get_device_capability(grad_RO.device) >= (10, 0):
                grad_weights = of_experts_with_rows(grad_weights, ends_N)
        return grad_rows, grad_weights, None


def of_experts_with_rows(grad_NOI: Tensor, ends_N: Tensor) -> Tensor:
    """Gradients, zero for experts without rows: Blackwell's kernel does not write them (pytorch/pytorch#172439)."""
    return torch.where(ends_N.diff(prepend=ends_N.new_zeros(1)).view(-1, 1, 1) > 0, grad_NOI, 0)


def products_one_by_one(rows: Tensor, weights_NOI: Tensor, counts_N: Tensor) -> Tensor:
    """The same, one expert at a time, in any format."""
    # Experts without rows take part, so that their gradients exist: ranks reduce them together.
    pairs = zip(torch.split(rows, counts_N.tolist()), weights_NOI.unbind(0), strict=True)
    return torch.cat([F.linear(own, weight) for own, weight in pairs])


def here(rows_RD: Tensor, counts_N: Tensor, compute: Compute, meanwhile: Meanwhile) -> Tensor:
    """All experts are on this device."""
    out_RD = compute(rows_RD, counts_N)
    meanwhile()
    return out_RD
