"""Attention over a sequence that several ranks share: ring, all-gather and all-to-all (Ulysses), all of them exact.

Every rank holds a zigzag slice of the sequence (context_order) and calls the same callable in place of CausalAttend.
B batch, L tokens of this rank, S tokens of all, H heads, K kv heads, E head_dim; `kv` is k and v in one buffer (2, B,
L, K, E), so that they travel as one message.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.errors import UserError
from meshwright.model import Attend, CausalAttend, Documents
from meshwright.model.numbers import wide_dtype
from meshwright.model.sinks import counted, gradient_of_sinks
from meshwright.parallel.context.blocks import block_backward, block_forward
from meshwright.parallel.context.order import Order, order_of, zigzag_places
from meshwright.parallel.world import all_gather

__all__ = ["METHODS", "make_context_attend", "merge", "ring_backward", "ring_forward", "run_in_step", "zigzag_places"]

# As world.all_gather: two names of one call.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

METHODS = ("ring", "allgather", "ulysses")

Arrival = Callable[[], Tensor]
"""Waits for what the previous rank sent."""


def make_context_attend(method: str, group: dist.ProcessGroup, window: int | None) -> Attend:
    """The callable that attends over the slices of all ranks of `group`, each within `window` tokens where set.

    It takes this rank's zigzag slices of q, k and v and the documents of the whole sequence in its natural order.
    """
    if method == "ring":
        return _BlockwiseAttend(_Ring, group, window)
    if method == "allgather":
        return _BlockwiseAttend(_AllGather, group, window)
    if method == "ulysses":
        return _UlyssesAttend(group, window)
    raise UserError(f'layout.cp_method = "{method}" is not one of {", ".join(METHODS)}; choose one of them')


class _BlockwiseAttend:
    """Attention merged from one block for every rank's keys."""

    def __init__(self, function: type[torch.autograd.Function], group: dist.ProcessGroup, window: int | None) -> None:
        self.function, self.group, self.window = function, group, window

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKE: Tensor,
        positions: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        order = order_of(rank, ranks, q_BLHE.shape[1] * ranks, documents, self.window, q_BLHE.device)
        given = (q_BLHE, k_BLKE, v_BLKE, sinks_H, order, self.group)
        out, lse = self.function.apply(*given)  # type: ignore[no-untyped-call]
        return out, lse


def merge(out_BLHE: Tensor, lse_BHL: Tensor, block_out_BLHE: Tensor, block_lse_BHL: Tensor) -> None:
    """Merge a block's attention into that of earlier blocks, in place; every query has seen a key before."""
    both = torch.logaddexp(lse_BHL, block_lse_BHL)
    before, now = ((lse - both).exp().transpose(1, 2).unsqueeze(-1) for lse in (lse_BHL, block_lse_BHL))
    out_BLHE.mul_(before).addcmul_(block_out_BLHE, now)
    lse_BHL.copy_(both)


class _Forward:
    """The attention of a rank's queries over the keys seen so far, in float32 at least."""

    def __init__(self, q_BLHE: Tensor, order: Order) -> None:
        self.q_BLHE, self.order = q_BLHE, order
        batch, length, heads, _ = q_BLHE.shape
        wide = wide_dtype(q_BLHE.dtype)
        self.out_BLHE = torch.empty(q_BLHE.shape, dtype=wide, device=q_BLHE.device)
        self.lse_BHL = torch.empty((batch, heads, length), dtype=wide, device=q_BLHE.device)

    def meet(self, source: int, kv: Tensor) -> None:
        """Add the keys of one rank; the first must be the rank's own, in which every query sees at least itself."""
        block = self.order.block(source)
        out, lse = block_forward(self.q_BLHE[:, block.queries], kv[0][:, block.keys], kv[1][:, block.keys], block)
        if block.diagonal:
            self.out_BLHE.copy_(out)
            self.lse_BHL.copy_(lse)
        else:
            merge(self.out_BLHE[:, block.queries], self.lse_BHL[:, :, block.queries], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        return self.out_BLHE.to(self.q_BLHE.dtype), self.lse_BHL


class _Backward:
    """The gradient of a rank's queries from the keys seen so far, in float32 at least."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse_BHL: Tensor, order: Order) -> None:
        self.grad_BLHE, self.q_BLHE, self.out_BLHE, self.lse_BHL, self.order = grad.contiguous(), q, out, lse_BHL, order
        self.grad_q_BLHE = torch.zeros(q.shape, dtype=wide_dtype(q.dtype), device=q.device)

    def meet(self, source: int, kv: Tensor, grad_kv: Tensor) -> None:
        """Add the keys of one rank, and add this rank's share to their gradient."""
        block = self.order.block(source)
        grad, q, out = (t[:, block.queries] for t in (self.grad_BLHE, self.q_BLHE, self.out_BLHE))
        k, v = kv[0][:, block.keys], kv[1][:, block.keys]
        grad_q, grad_k, grad_v = block_backward(grad, q, k, v, out, self.lse_BHL[:, :, block.queries], block)
        self.grad_q_BLHE[:, block.queries] += grad_q
        grad_kv[0][:, block.keys] += grad_k
        grad_kv[1][:, block.keys] += grad_v

    def result(self, grad_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = self.q_BLHE.dtype
        return self.grad_q_BLHE.to(dtype), grad_kv[0].to(dtype), grad_kv[1].to(dtype)


# ---- One operation: selective recomputation keeps results of operations, not of functions. ----

_Work = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
_under_way: list[_Work] = []
_library = torch.library.Library("meshwright", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "shared_attention(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
)
_library.impl(  # type: ignore[no-untyped-call]
    "shared_attention", lambda q, k, v: _under_way[-1](q, k, v), "CompositeExplicitAutograd"
)


def _as_one(work: _Work, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp by `work`, as one operation to torch; where its result was kept, nothing is sent."""
    _under_way.append(work)
    try:
        out, lse = torch.ops.meshwright.shared_attention(q, k, v)
    finally:
        _under_way.pop()
    return out, lse


# ---- Ring: keys and values move one rank further at every step, while the current block is computed. ----


def ring_forward(q: Tensor, kv: Tensor, order: Order) -> Generator[Tensor, Arrival, tuple[Tensor, Tensor]]:
    """Attention and log-sum-exp of one rank; yields what to send to the next rank and receives a function that waits
    for the other's.

    That function is called only after the current block, so that communication is hidden.
    """
    state = _Forward(q, order)
    sources = order.sources()
    for source in sources:
        arrival = (yield kv) if source != sources[-1] else None
        state.meet(source, kv)
        if arrival is not None:
            kv = arrival()
    return state.result()


def ring_backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, order: Order
) -> Generator[Tensor, Arrival, tuple[Tensor, Tensor, Tensor]]:
    """Gradients of q, k and v of one rank, in the same way.

    Keys travel as before. The gradient of a rank's keys starts at the next rank, accumulates every other rank's share
    one step behind the keys, and returns with the last step; the rank's own share waits there.
    """
    state = _Backward(grad, q, out, lse, order)
    sources = order.sources()
    home = torch.zeros_like(kv, dtype=wide_dtype(kv.dtype))
    grad_arrival: Arrival | None = None
    for source in sources:
        arrival = (yield kv) if source != sources[-1] else None
        share = home if source == order.rank else torch.zeros_like(home)
        state.meet(source, kv, share)
        if source != order.rank:
            if grad_arrival is not None:
                share += grad_arrival()
            grad_arrival = yield share
        if arrival is not None:
            kv = arrival()
    if grad_arrival is not None:
        home += grad_arrival()
    return state.result(home)


def _around(steps: Generator[Tensor, Arrival, tuple[Tensor, ...]], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Run one rank's part of the ring among the ranks of `group`."""
    try:
        outgoing = next(steps)
        while True:
            outgoing = steps.send(_pass_on(outgoing, group))
    except StopIteration as end:
        result: tuple[Tensor, ...] = end.value
        return result


def _pass_on(outgoing: Tensor, group: dist.ProcessGroup) -> Arrival:
    """Send to the next rank of the ring and receive from the previous one; both are in progress when this returns."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    incoming = torch.empty_like(outgoing)
    operations = [
        dist.P2POp(dist.isend, outgoing, dist.get_global_rank(group, (rank + 1) % ranks), group),
        dist.P2POp(dist.irecv, incoming, dist.get_global_rank(group, (rank - 1) % ranks), group),
    ]
    # A group that finishes each operation before it starts the next deadlocks if every rank sends first.
    under_way = dist.batch_isend_irecv(operations if rank % 2 == 0 else operations[::-1])

    def arrival() -> Tensor:
        for work in under_way:
            work.wait()
        return incoming

    return arrival


def run_in_step(parts: Sequence[Generator[Tensor, Arrival, tuple[Tensor, ...]]]) -> list[tuple[Tensor, ...]]:
    """Run the parts of all ranks, at least two, in this process, one step each in turn: one device can check a ring."""
    results: list[tuple[Tensor, ...]] = []
    outgoing = [next(part) for part in parts]
    while not results:
        arrivals = [partial(_as_it_is, outgoing[rank - 1]) for rank in range(len(parts))]
        outgoing = []
        for part, arrival in zip(parts, arrivals, strict=True):
            try:
                outgoing.append(part.send(arrival))
            except StopIteration as end:
                results.append(end.value)
    return results


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, order: Order, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        def work(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return _around(ring_forward(q, torch.stack((k, v)), order), group)

        return _keep(ctx, q, k, v, sinks_H, *_as_one(work, q, k, v), order, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out, lse = ctx.saved_tensors
        steps = ring_backward(grads[0], q, torch.stack((k, v)), out, lse, ctx.order)
        return *_around(steps, ctx.group), _of_sinks(grads[0], out, lse, sinks_H), None, None


# ---- All-gather: every rank's keys and values at once, and the same blocks. ----


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, order: Order, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        def work(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            everyones = _gathered(k, v, group)
            state = _Forward(q, order)
            for source in order.sources():
                state.meet(source, everyones[source])
            return state.result()

        return _keep(ctx, q, k, v, sinks_H, *_as_one(work, q, k, v), order, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out, lse = ctx.saved_tensors
        everyones = _gathered(k, v, ctx.group)
        state = _Backward(grads[0], q, out, lse, ctx.order)
        shares = torch.zeros_like(everyones, dtype=wide_dtype(k.dtype))
        for source in ctx.order.sources():
            state.meet(source, everyones[source], shares[source])
        home = torch.empty_like(shares[0])
        _reduce_scatter(home, shares.flatten(0, 1), group=ctx.group)
        return *state.result(home), _of_sinks(grads[0], out, lse, sinks_H), None, None


def _gathered(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    kv = torch.stack((k, v))
    everyones = torch.empty((dist.get_world_size(group), *kv.shape), dtype=kv.dtype, device=kv.device)
    all_gather(everyones.flatten(0, 1), kv, group=group)
    return everyones


def _keep(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    out: Tensor,
    lse: Tensor,
    order: Order,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Only this rank's own tensors are kept for the backward."""
    if sinks_H is not None:
        out, lse = counted(out, lse, sinks_H)
    ctx.save_for_backward(q, k, v, sinks_H, out, lse)
    ctx.order, ctx.group = order, group
    ctx.mark_non_differentiable(lse)
    return out, lse


def _of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks_H: Tensor | None) -> Tensor | None:
    return None if sinks_H is None else gradient_of_sinks(grad, out, lse, sinks_H)


# ---- All-to-all: every token for some of the heads, ordinary attention, and back. ----


class _UlyssesAttend:
    """Ordinary attention over the whole sequence with 1 / ranks of the heads; too few kv heads are repeated."""

    def __init__(self, group: dist.ProcessGroup, window: int | None) -> None:
        self.group, self.attend = group, CausalAttend(window)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKE: Tensor,
        positions: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        ranks = dist.get_world_size(self.group)
        copies = lcm(k_BLKE.shape[2], ranks) // k_BLKE.shape[2]
        if copies > 1:  # each still serves neighbouring queries, since what divides both divides their number too
            k_BLKE, v_BLKE = (t.repeat_interleave(copies, dim=2) for t in (k_BLKE, v_BLKE))
        by_rank = [torch.stack(t.chunk(ranks, dim=2)) for t in (q_BLHE, k_BLKE, v_BLKE)]
        whole = _natural(_all_to_all(torch.cat(by_rank, 3), self.group))
        q, k, v = torch.split(whole, [t.shape[3] for t in by_rank], dim=2)
        sinks = () if sinks_H is None else (sinks_H.chunk(ranks)[dist.get_rank(self.group)],)
        out_BSHE, lse_BHS = self.attend(q, k, v, positions, documents, *sinks)
        out_BLHE = _all_to_all(_zigzag(out_BSHE, ranks), self.group).movedim(0, 2).flatten(2, 3)
        if lse_BHS is None:
            return out_BLHE, None
        lse_BLH = _all_to_all(_zigzag(lse_BHS.detach().transpose(1, 2), ranks), self.group).movedim(0, 2).flatten(2, 3)
        return out_BLHE, lse_BLH.transpose(1, 2)


def _natural(slices: Tensor) -> Tensor:
    """Every rank's zigzag slice (ranks, B, L, …) as the whole sequence (B, S, …)."""
    early, late = slices.chunk(2, dim=2)
    return torch.cat([early, late.flip(0)]).movedim(0, 1).flatten(1, 2)


def _zigzag(whole: Tensor, ranks: int) -> Tensor:
    """The whole sequence (B, S, …) as every rank's zigzag slice (ranks, B, L, …)."""
    early, late = torch.stack(whole.chunk(2 * ranks, dim=1)).chunk(2)
    return torch.cat([early, late.flip(0)], dim=2)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    """Part i goes to rank i and part i of the result came from it; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None
