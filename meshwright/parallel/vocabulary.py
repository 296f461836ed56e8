"""Head and loss over a vocabulary that tensor-parallel ranks share: no rank ever holds a whole row of logits.

Torch's own loss parallelism wants the logits of all tokens at once; this keeps the chunks of the single-device head.
N tokens, D width, V vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshwright.model.cost import wide_dtype
from meshwright.model.head import CHUNK_LOGITS_BYTES, IGNORE, Head, add_product, divisor


class VocabularyParallelHead(nn.Module):
    """The head whose weight is cut by rows over tensor-parallel ranks; same parameter name, same loss."""

    def __init__(self, head: Head, mesh: DeviceMesh, vocab_size: int, placement: Placement) -> None:
        super().__init__()
        self.weight = head.weight
        self.mesh, self.vocab_size, self.placement = mesh, vocab_size, placement

    def forward(
        self, hidden: Tensor, labels_BS: Tensor | None = None, valid_count: Tensor | float | None = None
    ) -> Tensor:
        """Σ cross-entropy over labels other than IGNORE / valid_count, equal on every tensor-parallel rank."""
        if labels_BS is None or valid_count is None:
            raise ValueError("a head cut by vocabulary gives losses, not logits: give labels and valid_count")
        # Each rank's rows of the weight give only a part of the hidden states' gradient; the parts are summed here.
        whole = DTensor.from_local(hidden, self.mesh, [self.placement], run_check=False).redistribute(
            placements=[Replicate()]
        )
        hidden_BSD = whole.to_local(grad_placements=[Partial()])
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        first_row = self.mesh.get_local_rank() * weight.shape[0]
        loss: Tensor = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
            hidden_BSD.flatten(0, -2),
            weight,
            labels_BS.flatten(),
            valid_count,
            first_row,
            self.vocab_size,
            self.mesh.get_group(),
        )
        return loss


class _VocabularyLoss(torch.autograd.Function):
    """Chunked cross-entropy from some rows of the vocabulary; three small reductions a chunk make it whole."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        valid_count: Tensor | float,
        first_row: int,
        vocab_size: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        wide = wide_dtype(hidden_ND.dtype)
        count = divisor(valid_count)
        with_gradients = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if with_gradients else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if with_gradients else None
        rows_here = weight_VD.shape[0]
        padding = max(0, first_row + rows_here - vocab_size)

        chunk = max(1, CHUNK_LOGITS_BYTES // (4 * rows_here))
        for start in range(0, hidden_ND.shape[0], chunk):
            hidden = hidden_ND[start : start + chunk]
            labels = labels_N[start : start + chunk].unsqueeze(1)
            valid = labels != IGNORE
            here = valid & (labels >= first_row) & (labels < first_row + rows_here)
            target = torch.where(here, labels - first_row, 0)
            logits = (hidden @ weight_VD.t()).to(wide)
            if padding:
                logits[:, max(0, rows_here - padding) :] = float("-inf")
            highest = logits.max(dim=1, keepdim=True).values
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            logits.sub_(highest)
            sums = torch.cat([logits.exp().sum(1, keepdim=True), torch.where(here, logits.gather(1, target), 0.0)], 1)
            dist.all_reduce(sums, group=group)
            log_total, target_logit = sums[:, :1].log(), sums[:, 1:]
            loss += torch.where(valid, log_total - target_logit, 0.0).sum()
            if grad_hidden_ND is not None and grad_weight_VD is not None:
                share = valid.to(wide) / count
                grad = logits.sub_(log_total).exp_().mul_(share)
                grad.scatter_add_(1, target, torch.where(here, -share, 0.0))
                grad = grad.to(hidden.dtype)
                grad_hidden_ND[start : start + chunk] = grad @ weight_VD
                add_product(grad_weight_VD, grad.t(), hidden)

        if grad_hidden_ND is not None and grad_weight_VD is not None:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        hidden = grads[0].to(grad_hidden_ND.dtype) * grad_hidden_ND
        return hidden, grads[0].to(grad_weight_VD.dtype) * grad_weight_VD, None, None, None, None, None
