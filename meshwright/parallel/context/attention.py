"""Attention over a sequence that several ranks share: ring, all-gather and all-to-all (Ulysses), all of them exact.

Every rank holds a zigzag slice of the sequence (context_order) and calls the same callable in place of CausalAttend.
B batch, L tokens of this rank, S tokens of all, H heads, K kv heads, E head_dim.
"""

from collections.abc import Callable
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import UserError
from meshwright.model import Attend, CausalAttend, Documents
from meshwright.model.numbers import wide_dtype
from meshwright.model.sinks import counted, gradient_of_sinks
from meshwright.parallel.context.order import Order, order_of
from meshwright.parallel.context.rings import (
    attend_by_ring,
    attend_by_ring_backward,
    attend_gathered,
    attend_gathered_backward,
)

METHODS = ("ring", "allgather", "ulysses")


def make_context_attend(method: str, group: dist.ProcessGroup, window: int | None) -> Attend:
    """The callable that attends over the slices of all ranks of `group`, each within `window` tokens where set.

    It takes this rank's zigzag slices of q, k and v and the documents of the whole sequence in its natural order.
    """
    if method in ("ring", "allgather"):
        return _BlockwiseAttend(_Sharing(method, group, window))
    if method == "ulysses":
        return _UlyssesAttend(group, window)
    raise UserError(f'layout.cp_method = "{method}" is not one of {", ".join(METHODS)}; choose one of them')


class _Sharing(NamedTuple):
    """How ranks share a sequence; operations are given its number, since they cannot take a process group."""

    method: str
    group: dist.ProcessGroup
    window: int | None

    def order(self, q_BLHE: Tensor, ids_BS: Tensor | None, at_most: int | None) -> Order:
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        documents = None if ids_BS is None else Documents(ids_BS, at_most)
        return order_of(rank, ranks, q_BLHE.shape[1] * ranks, documents, self.window, q_BLHE.device)


_sharings: list[_Sharing] = []


def _number(sharing: _Sharing) -> int:
    """Its number; equal ones have the same, so that blocks which use them share a compilation."""
    if sharing not in _sharings:
        _sharings.append(sharing)
    return _sharings.index(sharing)


class _BlockwiseAttend:
    """Attention merged from one block for every rank's keys."""

    def __init__(self, sharing: _Sharing) -> None:
        self.sharing = _number(sharing)

    def __call__(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKE: Tensor,
        positions: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        ids_BS, at_most = (None, None) if documents is None else (documents.ids_BS, documents.at_most)
        given = (q_BLHE, k_BLKE, v_BLKE, sinks_H, ids_BS, at_most, self.sharing)
        out_BLHE, lse_BHL = torch.ops.meshwright.shared_attention(*given)
        return out_BLHE, lse_BHL


# ---- An operation forward and one backward: the compiler takes them whole, recomputation can keep the result. ----

_library = torch.library.Library("meshwright", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operation of torch; `torch.library.custom_op` would import the compiler, which takes seconds."""
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"meshwright::{name}", fake, lib=_library)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, ids: Tensor | None, at_most: int | None, sharing: int
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp; where a result was kept, this is not called and nothing is sent."""
    method, group, _ = _sharings[sharing]
    forward = attend_by_ring if method == "ring" else attend_gathered
    out, lse = forward(q, k, v, _sharings[sharing].order(q, ids, at_most), group)
    if sinks_H is not None:
        out, lse = counted(out, lse, sinks_H)
    return out, lse


def _attend_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _size = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=wide_dtype(q.dtype))


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ids: Tensor | None,
    at_most: int | None,
    sharing: int,
) -> tuple[Tensor, Tensor, Tensor]:
    method, group, _ = _sharings[sharing]
    backward = attend_by_ring_backward if method == "ring" else attend_gathered_backward
    return backward(grad, q, k, v, out, lse, _sharings[sharing].order(q, ids, at_most), group)


def _attend_backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Only this rank's own tensors are kept for the backward."""
    q, k, v, sinks_H, ids, ctx.at_most, ctx.sharing = inputs
    ctx.save_for_backward(q, k, v, sinks_H, ids, *output)


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks_H, ids, out, lse = ctx.saved_tensors
    given = (grad, q, k, v, out, lse, ids, ctx.at_most, ctx.sharing)
    grads = torch.ops.meshwright.shared_attention_backward(*given)
    of_sinks = None if sinks_H is None else gradient_of_sinks(grad, out, lse, sinks_H)
    return *grads, of_sinks, None, None, None


_define(
    "shared_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? ids, int? at_most, int sharing) -> "
    "(Tensor, Tensor)",
    _attend,
    _attend_fake,
)
_define(
    "shared_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? ids, "
    "int? at_most, int sharing) -> (Tensor, Tensor, Tensor)",
    _attend_backward,
    _attend_backward_fake,
)
torch.library.register_autograd("meshwright::shared_attention", _gradients, setup_context=_keep, lib=_library)


# ---- All-to-all: every token for some of the heads, ordinary attention, and back. ----


class _UlyssesAttend:
    """Ordinary attention over the whole sequence with 1 / ranks of the heads; too few kv heads are repeated."""

    def __init__(self, group: dist.ProcessGroup, window: int | None) -> None:
        self.sharing, self.attend = _number(_Sharing("ulysses", group, None)), CausalAttend(window)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def __call__(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKE: Tensor,
        positions: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        ranks = self.ranks
        copies = lcm(k_BLKE.shape[2], ranks) // k_BLKE.shape[2]
        if copies > 1:  # each still serves neighbouring queries, since what divides both divides their number too
            k_BLKE, v_BLKE = (t.repeat_interleave(copies, dim=2) for t in (k_BLKE, v_BLKE))
        by_rank = [torch.stack(t.chunk(ranks, dim=2)) for t in (q_BLHE, k_BLKE, v_BLKE)]
        whole = _natural(_all_to_all(torch.cat(by_rank, 3), self.sharing))
        q, k, v = torch.split(whole, [t.shape[3] for t in by_rank], dim=2)
        sinks = () if sinks_H is None else (sinks_H.chunk(ranks)[self.rank],)
        out_BSHE, lse_BHS = self.attend(q, k, v, positions, documents, *sinks)
        out_BLHE = _all_to_all(_zigzag(out_BSHE, ranks), self.sharing).movedim(0, 2).flatten(2, 3)
        if lse_BHS is None:
            return out_BLHE, None
        lse_BLH = (
            _all_to_all(_zigzag(lse_BHS.detach().transpose(1, 2), ranks), self.sharing).movedim(0, 2).flatten(2, 3)
        )
        return out_BLHE, lse_BLH.transpose(1, 2)


def _natural(slices: Tensor) -> Tensor:
    """Every rank's zigzag slice (ranks, B, L, …) as the whole sequence (B, S, …)."""
    early, late = slices.chunk(2, dim=2)
    return torch.cat([early, late.flip(0)]).movedim(0, 1).flatten(1, 2)


def _zigzag(whole: Tensor, ranks: int) -> Tensor:
    """The whole sequence (B, S, …) as every rank's zigzag slice (ranks, B, L, …)."""
    early, late = torch.stack(whole.chunk(2 * ranks, dim=1)).chunk(2)
    return torch.cat([early, late.flip(0)], dim=2)


def _all_to_all(parts: Tensor, sharing: int) -> Tensor:
    """Part i goes to rank i and part i of the result came from it; gradients return likewise."""
    received: Tensor = torch.ops.meshwright.exchange(parts, sharing)
    return received


def _exchange(parts: Tensor, sharing: int) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=_sharings[sharing].group)
    return received


def _keep_sharing(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    _, ctx.sharing = inputs


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _all_to_all(grad, ctx.sharing), None


_define("exchange(Tensor parts, int sharing) -> Tensor", _exchange, lambda parts, sharing: parts.new_empty(parts.shape))
torch.library.register_autograd("meshwright::exchange", _exchange_back, setup_context=_keep_sharing, lib=_library)
