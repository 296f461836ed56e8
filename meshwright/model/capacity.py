"""A limit on the tokens of a sequence that an expert takes: earlier ones first, the others are dropped for this expert.

Every expert gets equally many rows, filled or not, so that their number is known without counting.

B batch, S sequence, D width, N experts, K experts of a token, P pairs of a token and one of its experts (B × S × K), T
tokens (B × S), R rows of all experts, H runs: stretches of neighbouring tokens that this rank has of a sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Earlier = Callable[[Tensor], Tensor]
"""How many tokens of this rank's runs chose each expert (H, B, N), to how many did so before each run on all ranks."""


class Queues(NamedTuple):
    """Each token's place among those that chose the same expert, and whether the expert takes it."""

    place_BSK: Tensor
    """Among this rank's tokens of the sequence."""
    kept_BSK: Tensor
    most: int
    """Tokens of a sequence that an expert takes on this rank, at most."""


def queues(chosen_BSK: Tensor, count: int, most: int, runs: int = 1, earlier: Earlier | None = None) -> Queues:
    """Let the first `most` tokens of every sequence that chose an expert have it, wherever the others are."""
    batch, sequence, _ = chosen_BSK.shape
    joins_BSN = torch.zeros(batch, sequence, count, dtype=torch.int32, device=chosen_BSK.device)
    joins_BSN.scatter_(-1, chosen_BSK, 1)
    place_BSN = joins_BSN.cumsum(1, dtype=torch.int32) - joins_BSN
    place_BSK = place_BSN.gather(-1, chosen_BSK)
    if earlier is None:
        return Queues(place_BSK, place_BSK < most, min(most, sequence))
    parts = joins_BSN.tensor_split(runs, dim=1)
    counts_HBN = torch.stack([part.sum(1) for part in parts])
    elsewhere_HBN = earlier(counts_HBN) - (counts_HBN.cumsum(0) - counts_HBN)
    ahead_BSN = torch.cat([n.unsqueeze(1).expand_as(part) for n, part in zip(elsewhere_HBN, parts, strict=True)], 1)
    # A token that is taken has only taken ones before it, so its place on this rank is below `most` as well.
    return Queues(place_BSK, place_BSK + ahead_BSN.gather(-1, chosen_BSK) < most, min(most, sequence))


class Slots:
    """The rows that are handed to experts: as many of every sequence for every expert; those nobody fills are zero."""

    def __init__(self, chosen_BSK: Tensor, queued: Queues, count: int) -> None:
        batch, device = len(chosen_BSK), chosen_BSK.device
        self._top_k, pairs, rows = chosen_BSK.shape[-1], chosen_BSK.numel(), count * batch * queued.most
        sequence_B11 = torch.arange(batch, device=device).view(-1, 1, 1)
        row_BSK = (chosen_BSK * batch + sequence_B11) * queued.most + queued.place_BSK
        self._row_of_pair_P = row_BSK.where(queued.kept_BSK, rows).flatten()
        pair_of_row = torch.full((rows + 1,), pairs, device=device)
        pair_of_row[self._row_of_pair_P] = torch.arange(pairs, device=device)
        self._pair_of_row_R = pair_of_row[:rows]
        self.counts_N = torch.full((count,), batch * queued.most, device=device)
        """Rows of each expert."""

    def rows(self, x_TD: Tensor) -> Tensor:
        """The tokens in the rows of their experts."""
        given = (x_TD, self._pair_of_row_R, self._row_of_pair_P, self._top_k)
        rows_RD: Tensor = _IntoRows.apply(*given)  # type: ignore[no-untyped-call]
        return rows_RD

    def combined(self, out_RD: Tensor, weights_TK: Tensor) -> Tensor:
        """The weighted sum of each token's results, added up in the weights' format; a dropped one adds nothing, and
        the weights of the others stay as they are."""
        of_pairs_PD = _FromRows.apply(out_RD, self._row_of_pair_P, self._pair_of_row_R)  # type: ignore[no-untyped-call]
        by_token_TKD = of_pairs_PD.view(*weights_TK.shape, -1)
        result: Tensor = (by_token_TKD * weights_TK.unsqueeze(-1)).sum(1).to(out_RD.dtype)
        return result


class _IntoRows(torch.autograd.Function):
    """Rows gathered from tokens; only the rows that a token fills have a part in its gradient."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, pair_of_row_R: Tensor, row_of_pair_P: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(row_of_pair_P)
        ctx.top_k = top_k
        return _or_zero(x_TD, pair_of_row_R // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        [row_of_pair_P] = ctx.saved_tensors
        return _or_zero(grad, row_of_pair_P).view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


class _FromRows(torch.autograd.Function):
    """Results gathered for pairs of a token and an expert; the gradient of a row that nobody fills is zero."""

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, row_of_pair_P: Tensor, pair_of_row_R: Tensor) -> Tensor:
        ctx.save_for_backward(pair_of_row_R)
        return _or_zero(out_RD, row_of_pair_P)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        [pair_of_row_R] = ctx.saved_tensors
        return _or_zero(grad, pair_of_row_R), None, None


def _or_zero(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], and zeros for the index after the last row."""
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[index]
