"""Embedding, head and loss over a vocabulary that tensor-parallel ranks share: no rank ever holds a whole row of
logits, or a gradient of the whole table.

Torch's own loss parallelism needs the logits of all tokens at once; this keeps the chunks of the single-device head.
Its embedding of a sharded table gives every rank a gradient of the whole one, of which the rank's rows are a view.
B batch, S sequence, N tokens, D width, V vocabulary.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshwright.model import IGNORE, Pairs
from meshwright.model.head import Head, chunked_loss, loss_of_logits, preference_loss
from meshwright.model.numbers import wide_dtype
from meshwright.torch_private.sharding import AsyncCollectiveTensor


class VocabularyParallelEmbedding(nn.Module):
    """The table sharded by rows over tensor-parallel ranks: each looks up the tokens it has rows of, and all are
    summed; same parameter name, same values."""

    def __init__(self, embed: nn.Embedding, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        self.weight = embed.weight
        self.mesh, self.placement, self.padding_idx = mesh, placement, embed.padding_idx

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """The rows of all tokens, whole or sharded along the sequence, as the residual stream is placed."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        first = self.mesh.get_local_rank() * len(weight)
        parts_BSD = cast(Tensor, _OwnRows.apply(tokens_BS, weight, first, self.padding_idx))  # type: ignore[no-untyped-call]
        summed = DTensor.from_local(parts_BSD, self.mesh, [Partial()], run_check=False)
        # In transit it would be waited for in a compiled block, in a way that autograd does not see, and the table be
        # left without a gradient.
        return cast(Tensor, _Arrived.apply(summed.redistribute(placements=[self.placement]).to_local()))  # type: ignore[no-untyped-call]


class _OwnRows(torch.autograd.Function):
    """The rows of tokens that are among a rank's own, from `first` on; of others zeros. Only the tokens are saved."""

    @staticmethod
    def forward(ctx: Any, tokens_BS: Tensor, weight: Tensor, first: int, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(tokens_BS)
        ctx.first, ctx.rows, ctx.padding_idx = first, len(weight), padding_idx
        rows_BS, missing_BS1 = _own_rows(tokens_BS, first, len(weight))
        return F.embedding(rows_BS, weight).masked_fill_(missing_BS1, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor, None, None]:
        (tokens_BS,) = ctx.saved_tensors
        rows_BS, missing_BS1 = _own_rows(tokens_BS, ctx.first, ctx.rows)
        if ctx.padding_idx is not None:  # its row gets no gradient
            missing_BS1 = missing_BS1 | (tokens_BS == ctx.padding_idx).unsqueeze(-1)
        own = grads[0].masked_fill(missing_BS1, 0.0)
        return None, torch.ops.aten.embedding_dense_backward(own, rows_BS, ctx.rows, -1, False), None, None


def _own_rows(tokens_BS: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Where tokens are among a rank's rows, and which are not."""
    rows_BS = tokens_BS - first
    missing_BS = (rows_BS < 0) | (rows_BS >= count)
    return rows_BS.masked_fill_(missing_BS, 0), missing_BS.unsqueeze(-1)


class _Arrived(torch.autograd.Function):
    """The same values, waited for; no copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if isinstance(x, AsyncCollectiveTensor):
            return cast(Tensor, x.trigger_wait())  # type: ignore[no-untyped-call]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class VocabularyParallelHead(nn.Module):
    """The head whose weight is sharded by rows over tensor-parallel ranks; same parameter name, same loss."""

    def __init__(self, head: Head, mesh: DeviceMesh, vocab_size: int, placement: Placement) -> None:
        super().__init__()
        self.weight = head.weight
        self.mesh, self.vocab_size, self.placement = mesh, vocab_size, placement
        self.products = head.products
        self._own_loss = None if head.loss_of_logits is loss_of_logits else head.loss_of_logits

    def forward(
        self,
        hidden: Tensor,
        labels_BS: Tensor | None = None,
        valid_count: Tensor | float | None = None,
        pairs: Pairs | None = None,
    ) -> Tensor:
        """Σ cross-entropy over labels other than IGNORE / valid_count, or the loss of pairs, equal on every
        tensor-parallel rank."""
        if labels_BS is None or valid_count is None:
            raise ValueError("a head sharded by vocabulary returns losses, not logits: pass labels and valid_count")
        # Each rank's rows of the weight give only a part of the hidden states' gradient; the parts are summed here.
        whole = DTensor.from_local(hidden, self.mesh, [self.placement], run_check=False).redistribute(
            placements=[Replicate()]
        )
        hidden_BSD = whole.to_local(grad_placements=[Partial()])
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        loss = self._loss_of_logits if self._own_loss is None else self._loss_of_whole_rows
        if pairs is not None:
            return preference_loss(hidden_BSD, weight, labels_BS, valid_count, loss, pairs, self.products)
        return chunked_loss(hidden_BSD, weight, labels_BS, valid_count, loss, products=self.products)

    def _loss_of_whole_rows(
        self, logits_NV: Tensor, labels_N1: Tensor, shares_N1: Tensor, with_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A loss of the user's own, which takes whole rows of logits: those of a chunk are gathered on every rank."""
        assert self._own_loss is not None
        rows, ranks = logits_NV.shape[1], self.mesh.size()
        parts = [torch.empty_like(logits_NV) for _ in range(ranks)]
        dist.all_gather(parts, logits_NV.contiguous(), group=self.mesh.get_group())
        whole_NV = torch.cat(parts, 1)[:, : self.vocab_size]
        loss, grad_NV = self._own_loss(whole_NV, labels_N1, shares_N1, with_gradient)
        if grad_NV is None:
            return loss, None
        padded_NV = F.pad(grad_NV, (0, rows * ranks - self.vocab_size))
        first = self.mesh.get_local_rank() * rows
        return loss, padded_NV[:, first : first + rows].contiguous()

    def _loss_of_logits(
        self, logits_NV: Tensor, labels_N1: Tensor, shares_N1: Tensor, with_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The loss over the whole vocabulary from this rank's rows of it, with two small reductions."""
        rows, group = logits_NV.shape[1], self.mesh.get_group()
        first = self.mesh.get_local_rank() * rows
        valid_N1 = labels_N1 != IGNORE
        here_N1 = valid_N1 & (labels_N1 >= first) & (labels_N1 < first + rows)
        target_N1 = torch.where(here_N1, labels_N1 - first, 0)
        wide_NV = logits_NV.to(wide_dtype(logits_NV.dtype))
        if padding := max(0, first + rows - self.vocab_size):
            wide_NV[:, max(0, rows - padding) :] = float("-inf")
        highest_N1 = wide_NV.max(dim=1, keepdim=True).values
        dist.all_reduce(highest_N1, dist.ReduceOp.MAX, group=group)
        own_N1 = torch.where(here_N1, wide_NV.gather(1, target_N1) - highest_N1, 0.0)
        powers_NV = wide_NV.sub_(highest_N1).exp_()
        sums_N2 = torch.cat([powers_NV.sum(1, keepdim=True), own_N1], 1)
        dist.all_reduce(sums_N2, group=group)
        total_N1 = sums_N2[:, :1]
        losses_N1 = torch.where(valid_N1, total_N1.log() - sums_N2[:, 1:], 0.0)
        if not with_gradient:
            return losses_N1, None
        grad_NV = powers_NV.mul_(shares_N1 / total_N1)
        grad_NV.scatter_add_(1, target_N1, torch.where(here_N1, -shares_N1, 0.0))
        return losses_N1, grad_NV.to(logits_NV.dtype)
