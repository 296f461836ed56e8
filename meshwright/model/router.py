"""The router of a mixture of experts: which experts each token is sent to, and with which weights.

B batch, S sequence, D width, N experts, K experts of a token. Scores and losses are computed in float32 or wider.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job.experts import Experts
from meshwright.model.capacity import Earlier, Queues, queues
from meshwright.model.numbers import wide_dtype
from meshwright.model.wide import wide_product
from meshwright.torch_private.autograd import in_backward


class Routing(NamedTuple):
    """The experts of each token, best first, and their weights; and how many tokens of each sequence chose an expert,
    dropped or not."""

    chosen_BSK: Tensor
    weights_BSK: Tensor
    counts_BN: Tensor
    own_BSK: Tensor
    """The router's own choice; another one may have been replayed."""


class WideLinear(nn.Linear):
    """A projection in float32 or wider, whatever its input's format."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.own: Callable[[Tensor], Tensor] = as_it_is
        """The parameters as this rank computes with them."""

    def forward(self, x: Tensor) -> Tensor:
        wide = wide_dtype(x.dtype)
        weight, bias = self.own(self.weight), None if self.bias is None else self.own(self.bias)
        if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
            product = wide_product(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)
            return product if bias is None else product + bias.to(wide)
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def as_it_is(parameter: Tensor) -> Tensor:
    """A parameter that is whole on this device."""
    return parameter


class Router(nn.Module):
    """Scores every expert for every token and chooses the best."""

    preference: Tensor
    """Added to the scores when experts are chosen, not to their weights; see experts.balance_rate."""
    load: Tensor
    """Tokens that chose each expert since it was last reset, on this rank. Those that are dropped count too: balancing
    acts on the router's choice, as in GShard and Switch, and dropping must not hide an expert that is chosen too
    often."""
    dropped: Tensor
    """Pairs of a token and an expert that were dropped in the same time."""
    loss_share: float = 1.0
    """What one sequence's losses count in the step's loss."""
    sequence_parts: int = 1
    """Ranks that share a sequence."""
    sum_over_sequence: Callable[[Tensor], Tensor] | None = None
    """Sums counts over the ranks that share a sequence."""
    sequence_runs: int = 1
    """Stretches of neighbouring tokens that this rank has of a sequence."""
    earlier_tokens: Earlier | None = None
    """Counts the tokens before each run over the ranks that share a sequence."""

    def __init__(self, width: int, experts: Experts, *, bias: bool = False) -> None:
        super().__init__()
        self.experts = experts
        self.linear = WideLinear(width, experts.count, bias=bias)
        self.register_buffer("preference", torch.zeros(experts.count, dtype=torch.float32), persistent=False)
        self.register_buffer("load", torch.zeros(experts.count, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)

    def reset(self) -> None:
        """Give the buffers their first values, where memory was allocated without any."""
        self.preference.zero_()
        self.load.zero_()
        self.dropped.zero_()

    def forward(self, x_BSD: Tensor, replayed_BSK: Tensor | None = None) -> Routing:
        """Tokens to their experts; `replayed_BSK` replaces the router's choice."""
        logits_BSN: Tensor = self.linear(x_BSD)
        softmax = self.experts.scores == "softmax"
        scores_BSN = logits_BSN.softmax(-1) if softmax else logits_BSN.sigmoid()
        own_BSK = self._choose(scores_BSN.detach())
        chosen_BSK = own_BSK if replayed_BSK is None else replayed_BSK
        weights_BSK = scores_BSN.gather(-1, chosen_BSK)
        if self.experts.normalised:
            weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + (0.0 if softmax else 1e-20))
        counts_BN = _counts(chosen_BSK, self.experts.count)
        if torch.is_grad_enabled():
            weights_BSK = self._with_losses(weights_BSK, logits_BSN, scores_BSN, counts_BN)
        return Routing(chosen_BSK, weights_BSK * self.experts.scale, counts_BN, own_BSK)

    def queued(self, routing: Routing) -> Queues | None:
        """Which tokens their experts take, where experts.capacity limits them: in training only, so that a trained
        model computes the same for a text in one pass and token by token."""
        most = self.experts.most_tokens(routing.chosen_BSK.shape[1] * self.sequence_parts)
        if most is None or not torch.is_grad_enabled():
            return None
        return queues(routing.chosen_BSK, self.experts.count, most, self.sequence_runs, self.earlier_tokens)

    def count(self, routing: Routing, queued: Queues | None) -> None:
        """Add a training step's tokens to the load; not again when the block is recomputed."""
        if torch.is_grad_enabled() and not in_backward():
            self.load += routing.counts_BN.sum(0)
            if queued is not None:
                self.dropped += queued.kept_BSK.logical_not().sum()

    def _choose(self, scores_BSN: Tensor) -> Tensor:
        """The numbers of the best experts; of equal ones the first."""
        experts = self.experts
        if experts.force_balance:
            batch, sequence, count = scores_BSN.shape
            turns = torch.arange(batch * sequence * experts.top_k, device=scores_BSN.device) % count
            return turns.view(batch, sequence, experts.top_k)
        preferred_BSN = scores_BSN + self.preference.to(scores_BSN.dtype)
        if experts.groups_kept < experts.groups:
            best = preferred_BSN.view(*preferred_BSN.shape[:-1], experts.groups, -1)
            most = min(2, best.shape[-1])  # a group may be a single expert
            of_group = best.topk(most, -1).values.sum(-1) if experts.scores == "sigmoid" else best.amax(-1)
            kept = of_group.sort(dim=-1, descending=True, stable=True).indices[..., : experts.groups_kept]
            outside = torch.ones_like(of_group, dtype=torch.bool).scatter_(-1, kept, False)
            preferred_BSN = best.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)
        # A copy: the backward keeps it, and with a view the numbers of all experts.
        return preferred_BSN.sort(dim=-1, descending=True, stable=True).indices[..., : experts.top_k].contiguous()

    def _with_losses(self, weights_BSK: Tensor, logits_BSN: Tensor, scores_BSN: Tensor, counts_BN: Tensor) -> Tensor:
        """The weights, with the gradients of the balance loss and the z-loss attached."""
        experts, tokens = self.experts, scores_BSN.shape[1] * self.sequence_parts
        losses = []
        if experts.balance_loss:
            if self.sum_over_sequence is not None:
                counts_BN = self.sum_over_sequence(counts_BN)
            often_BN = counts_BN * (experts.count / (experts.top_k * tokens))
            shares_BSN = scores_BSN if experts.scores == "softmax" else scores_BSN / scores_BSN.sum(-1, keepdim=True)
            losses.append(experts.balance_loss * (often_BN.unsqueeze(1) * shares_BSN).sum() / tokens)
        if experts.z_loss:
            losses.append(experts.z_loss * logits_BSN.logsumexp(-1).square().sum() / tokens)
        for loss in losses:
            weights_BSK = _WithLoss.apply(weights_BSK, loss * self.loss_share)  # type: ignore[no-untyped-call]
        return weights_BSK


def routers(model: nn.Module) -> list[tuple[int, Router]]:
    """The routers of a model or of a stage of it, by layer."""
    layers = model.get_submodule("layers")
    found = [(name, part) for name, block in layers.named_children() for part in block.modules()]
    return [(int(name), part) for name, part in found if isinstance(part, Router)]


def _counts(chosen_BSK: Tensor, count: int) -> Tensor:
    """How many tokens of each sequence each expert gets, (B, N)."""
    flat = chosen_BSK.flatten(1)
    ones = torch.ones_like(flat)
    return torch.zeros(flat.shape[0], count, dtype=flat.dtype, device=flat.device).scatter_add_(1, flat, ones)


class _WithLoss(torch.autograd.Function):
    """A tensor unchanged; its backward also starts that of a loss, which thus reaches the router of any pipeline stage
    without being passed to the last one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_like = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.loss_like
