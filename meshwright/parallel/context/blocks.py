"""Attention of one block: some queries over some keys. B batch, Q queries, T keys, H heads, K kv heads, E head_dim.

A query's keys come in several blocks. Forward gives each block's result with its log-sum-exp, by which the results are
weighted against each other. Backward takes the result and the log-sum-exp over *all* the query's keys, and then gives
exactly this block's share of the gradients: the softmax's weights are exp(score - log-sum-exp) in whichever block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.model import Documents
from meshwright.model.numbers import wide_dtype
from meshwright.parallel.context.order import Block
from meshwright.torch_private.attention import (
    cpu_flash,
    cpu_flash_backward,
    cudnn_attention,
    cudnn_attention_backward,
    varlen_flash,
    varlen_flash_backward,
)

CUDNN_TILE = 64
"""Lengths that cuDNN is given are multiples of this."""
SLICE_ELEMENTS = 2**22
"""Where kernels need masks and scores, they are built for few enough queries at a time to have at most this many
elements."""


def block_forward(q_BQHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The block's attention and its log-sum-exp (B, H, Q); queries that see no key get 0 and -inf."""
    if not q_BQHE.is_cuda:
        return cpu_forward(q_BQHE, k_BTKE, v_BTKE, block)
    if _cudnn_takes(q_BQHE, block):
        return cudnn_forward(q_BQHE, k_BTKE, v_BTKE, block)
    if _flash_takes(q_BQHE, block):
        return flash_forward(q_BQHE, k_BTKE, v_BTKE, block)
    return math_forward(q_BQHE, k_BTKE, v_BTKE, block)


def block_backward(
    grad_BQHE: Tensor,
    q_BQHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    out_BQHE: Tensor,
    lse_BHQ: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients of q, k and v; `out` and `lse` are those over all keys of the query."""
    if not q_BQHE.is_cuda:
        return cpu_backward(grad_BQHE, q_BQHE, k_BTKE, v_BTKE, out_BQHE, lse_BHQ, block)
    if _cudnn_takes(q_BQHE, block):
        return cudnn_backward(grad_BQHE, q_BQHE, k_BTKE, v_BTKE, out_BQHE, lse_BHQ, block)
    if _flash_takes(q_BQHE, block):
        return flash_backward(grad_BQHE, q_BQHE, k_BTKE, v_BTKE, out_BQHE, lse_BHQ, block)
    return math_backward(grad_BQHE, q_BQHE, k_BTKE, v_BTKE, out_BQHE, lse_BHQ, block)


def _query_slices(queries: int, elements_per_query: int) -> Iterator[slice]:
    rows = max(1, SLICE_ELEMENTS // elements_per_query)
    return (slice(start, min(start + rows, queries)) for start in range(0, queries, rows))


# ---- CPU: torch's flash kernel, with a mask where documents or a window need one. --------------------------------


def _cpu_masks(q_BQHE: Tensor, block: Block) -> Iterator[tuple[slice, Tensor | None, Tensor | None]]:
    """Rows, what they see (1 or B, rows, T) and that as an additive mask; all rows at once where neither is needed."""
    if block.first_BQ is None:
        yield slice(None), None, None
        return
    for rows in _query_slices(q_BQHE.shape[1], block.first_BQ.shape[0] * len(block.places_T)):
        visible = block.visible(rows)
        mask = torch.zeros(visible.shape, dtype=q_BQHE.dtype).masked_fill_(~visible, float("-inf"))
        yield rows, visible, mask.unsqueeze(1)


def cpu_forward(q_BQHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """`block_forward` on a CPU."""
    q, k, v = (t.transpose(1, 2) for t in (q_BQHE, k_BTKE, v_BTKE))
    outs, lses = [], []
    for rows, visible, mask in _cpu_masks(q_BQHE, block):
        out, lse = cpu_flash(q[:, :, rows], k, v, 0.0, block.diagonal and mask is None, attn_mask=mask)
        if visible is not None:
            lse = torch.where(visible.any(-1).unsqueeze(1), lse, float("-inf"))  # the kernel returns 0, and 0 for out
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2).transpose(1, 2), torch.cat(lses, 2)


def cpu_backward(
    grad_BQHE: Tensor,
    q_BQHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    out_BQHE: Tensor,
    lse_BHQ: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_backward` on a CPU."""
    grad, q, k, v, out = (t.transpose(1, 2) for t in (grad_BQHE, q_BQHE, k_BTKE, v_BTKE, out_BQHE))
    grad_qs = []
    wide = wide_dtype(q.dtype)
    grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, _, mask in _cpu_masks(q_BQHE, block):
        grad_q, more_k, more_v = cpu_flash_backward(
            grad[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse_BHQ[:, :, rows], 0.0,
            block.diagonal and mask is None, attn_mask=mask,
        )  # fmt: skip
        grad_qs.append(grad_q)
        grad_k += more_k
        grad_v += more_v
    return torch.cat(grad_qs, 2).transpose(1, 2), grad_k.transpose(1, 2), grad_v.transpose(1, 2)


# ---- CUDA, 16-bit, no documents: cuDNN's kernels, on Hopper faster than torch's flash kernels. -------------------


def _cudnn_takes(q_BQHE: Tensor, block: Block) -> bool:
    """Where a run has found another kernel faster, it has disabled cuDNN's."""
    if block.first_BQ is not None or not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    fits = q_BQHE.shape[-1] % 8 == 0 and q_BQHE.shape[-1] <= 128
    whole = len(block.places_Q) % CUDNN_TILE == 0 and len(block.places_T) % CUDNN_TILE == 0
    there = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    known = there and torch.cuda.get_device_capability(q_BQHE.device) >= (9, 0)
    return fits and whole and known and q_BQHE.dtype in (torch.float16, torch.bfloat16)


def cudnn_forward(q_BQHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """`block_forward` by cuDNN."""
    q, k, v = (t.transpose(1, 2) for t in (q_BQHE, k_BTKE, v_BTKE))
    out, lse, *_ = cudnn_attention(q, k, v, None, True, 0.0, block.diagonal, False)
    return out.transpose(1, 2), lse.view(lse.shape[:3])


def cudnn_backward(
    grad_BQHE: Tensor,
    q_BQHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    out_BQHE: Tensor,
    lse_BHQ: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_backward` by cuDNN."""
    grad, q, k, v, out = (t.transpose(1, 2) for t in (grad_BQHE, q_BQHE, k_BTKE, v_BTKE, out_BQHE))
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)
    grads = cudnn_attention_backward(
        grad, q, k, v, out, lse_BHQ.contiguous().unsqueeze(-1), no_dropout[0], no_dropout[1], None, None, None,
        q.shape[2], k.shape[2], 0.0, block.diagonal,
    )  # fmt: skip
    grad_q, grad_k, grad_v = (each.transpose(1, 2) for each in grads)
    return grad_q, grad_k, grad_v


# ---- CUDA, 16-bit: the flash kernels for sequences of unequal lengths. -------------------------------------------


def _flash_takes(q_BQHE: Tensor, block: Block) -> bool:
    fits = q_BQHE.shape[-1] % 8 == 0 and q_BQHE.shape[-1] <= 256
    return fits and q_BQHE.dtype in (torch.float16, torch.bfloat16) and not block.windowed


def flash_spans(block: Block, batch: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The block as int32 boundaries of query and of key spans in the flattened batch, for kernels that take those.

    Span i of the queries sees span i of the keys. Also which queries (B, Q) see any key and which keys (B, T) are seen
    by any query, None for all: kernels leave the rest undefined. Lengths are fixed and nothing waits for the device.
    """
    queries, keys = len(block.places_Q), len(block.places_T)
    row = torch.arange(batch + 1, device=block.places_Q.device)
    if block.first_BQ is None:
        return (row * queries).int(), (row * keys).int(), None, None
    if block.diagonal:
        boundaries = Documents(block.first_BQ, block.at_most).bounded().boundaries
        assert boundaries is not None
        return boundaries, boundaries, None, None
    # All keys come before all queries, so only one document of a row can be on both sides: it has the last keys and
    # the first queries. Three spans a row: keys without queries, that document, queries without keys.
    seeing, seen = block.first_BQ <= block.places_T[-1], block.places_T >= block.first_BQ[:, :1]
    row_q, row_t = row[:-1] * queries, row[:-1] * keys
    spans_q = torch.stack([row_q, row_q, row_q + seeing.sum(1)], 1).flatten()
    spans_t = torch.stack([row_t, row_t + keys - seen.sum(1), row_t + keys], 1).flatten()
    return torch.cat([spans_q, row[-1:] * queries]).int(), torch.cat([spans_t, row[-1:] * keys]).int(), seeing, seen


def flash_forward(q_BQHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """`block_forward` on CUDA in 16 bits."""
    batch, queries, heads, _ = q_BQHE.shape
    spans_q, spans_t, seeing, _ = flash_spans(block, batch)
    out, lse, *_ = varlen_flash(
        q_BQHE.flatten(0, 1), k_BTKE.flatten(0, 1), v_BTKE.flatten(0, 1), spans_q, spans_t, queries, k_BTKE.shape[1],
        0.0, block.diagonal, False,
    )  # fmt: skip
    out_BQHE, lse_BHQ = out.view(q_BQHE.shape), lse.view(heads, batch, queries).transpose(0, 1)
    if seeing is not None:
        out_BQHE = torch.where(seeing[:, :, None, None], out_BQHE, 0.0)
        lse_BHQ = torch.where(seeing[:, None], lse_BHQ, float("-inf"))
    return out_BQHE, lse_BHQ


def flash_backward(
    grad_BQHE: Tensor,
    q_BQHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    out_BQHE: Tensor,
    lse_BHQ: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_backward` on CUDA in 16 bits."""
    spans_q, spans_t, seeing, seen = flash_spans(block, q_BQHE.shape[0])
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BQHE.device), torch.empty(0, device=q_BQHE.device)
    grad_q, grad_k, grad_v = varlen_flash_backward(
        grad_BQHE.flatten(0, 1), q_BQHE.flatten(0, 1), k_BTKE.flatten(0, 1), v_BTKE.flatten(0, 1),
        out_BQHE.flatten(0, 1), lse_BHQ.transpose(0, 1).flatten(1, 2).contiguous(), spans_q, spans_t,
        q_BQHE.shape[1], k_BTKE.shape[1], 0.0, block.diagonal, *no_dropout,
    )  # fmt: skip
    grad_q, grad_k, grad_v = grad_q.view(q_BQHE.shape), grad_k.view(k_BTKE.shape), grad_v.view(v_BTKE.shape)
    if seeing is not None and seen is not None:
        grad_q = torch.where(seeing[:, :, None, None], grad_q, 0.0)
        grad_k, grad_v = (torch.where(seen[:, :, None, None], grad, 0.0) for grad in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


# ---- Anything else on CUDA: the formulas, a chunk of the queries at a time. G = H / K heads share one of k and v. ----


def _grouped(x_BRHE: Tensor, k_BTKE: Tensor) -> Tensor:
    """(B, R, K, G, E): the heads by which of k and v they share."""
    batch, rows, _, head_dim = x_BRHE.shape
    return x_BRHE.reshape(batch, rows, k_BTKE.shape[2], -1, head_dim)


def _scores(q_BRHE: Tensor, k_BTKE: Tensor, block: Block, rows: slice) -> Tensor:
    """Scaled scores (B, K, G, R, T), -inf where unseen."""
    scores: Tensor = torch.einsum("brkge,btke->bkgrt", _grouped(q_BRHE, k_BTKE), k_BTKE) * q_BRHE.shape[-1] ** -0.5
    if block.diagonal or block.first_BQ is not None:
        scores.masked_fill_(~block.visible(rows)[:, None, None], float("-inf"))
    return scores


def math_forward(q_BQHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """`block_forward` by its formulas, in float32 at least."""
    wide = wide_dtype(q_BQHE.dtype)
    batch, queries, heads, _ = q_BQHE.shape
    out_BQHE = torch.empty_like(q_BQHE, dtype=wide)
    lse_BHQ = torch.empty((batch, heads, queries), dtype=wide, device=q_BQHE.device)
    q, k, v = (t.to(wide) for t in (q_BQHE, k_BTKE, v_BTKE))
    for rows in _query_slices(queries, batch * heads * k.shape[1]):
        scores = _scores(q[:, rows], k, block, rows)
        lse = scores.logsumexp(-1)
        # -inf - -inf is NaN; with 0 in its place the weights of a query that sees nothing are exp(-inf) = 0.
        weights = scores.sub_(torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1)).exp_()
        out_BQHE[:, rows] = torch.einsum("bkgrt,btke->brkge", weights, v).flatten(2, 3)
        lse_BHQ[:, :, rows] = lse.flatten(1, 2)
    return out_BQHE, lse_BHQ


def math_backward(
    grad_BQHE: Tensor,
    q_BQHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    out_BQHE: Tensor,
    lse_BHQ: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_backward` by its formulas, in float32 at least."""
    wide = wide_dtype(q_BQHE.dtype)
    batch, queries, heads, head_dim = q_BQHE.shape
    grad, q, k, v, out = (t.to(wide) for t in (grad_BQHE, q_BQHE, k_BTKE, v_BTKE, out_BQHE))
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _query_slices(queries, batch * heads * k.shape[1]):
        q_rows, grad_rows = _grouped(q[:, rows], k), _grouped(grad[:, rows], k)
        scores = _scores(q[:, rows], k, block, rows)
        weights = scores.sub_(lse_BHQ[:, :, rows].reshape(scores.shape[:-1]).unsqueeze(-1)).exp_()
        grad_v += torch.einsum("bkgrt,brkge->btke", weights, grad_rows)
        grad_weights = torch.einsum("brkge,btke->bkgrt", grad_rows, v)
        along_out = (grad[:, rows] * out[:, rows]).sum(-1).transpose(1, 2).reshape(scores.shape[:-1])
        grad_scores = grad_weights.sub_(along_out.unsqueeze(-1)).mul_(weights).mul_(head_dim**-0.5)
        grad_q[:, rows] = torch.einsum("bkgrt,btke->brkge", grad_scores, k).flatten(2, 3)
        grad_k += torch.einsum("bkgrt,brkge->btke", grad_scores, q_rows)
    return grad_q, grad_k, grad_v
