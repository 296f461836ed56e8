"""Attention of one rank's queries over every rank's keys, block by block: passed around a ring, or gathered at once.

B batch, L tokens of this rank, H heads, K kv heads, E head_dim; `kv` is k and v in one buffer (2, B, L, K, E), so that
they travel as one message.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.model.numbers import wide_dtype
from meshwright.parallel.context.blocks import block_backward, block_forward
from meshwright.parallel.context.order import Order
from meshwright.parallel.world import all_gather

# As world.all_gather: two names of one call.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Arrival = Callable[[], Tensor]
"""Waits for what the previous rank sent."""


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
        dtype = self.q_BLHE.dtype  # and memory of its own for each, as an operation's results must have
        return self.grad_q_BLHE.to(dtype), grad_kv[0].to(dtype, copy=True), grad_kv[1].to(dtype, copy=True)


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


def attend_by_ring(q: Tensor, k: Tensor, v: Tensor, order: Order, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp of this rank's queries; keys and values go around the ranks of `group`."""
    out, lse = _around(ring_forward(q, torch.stack((k, v)), order), group)
    return out, lse


def attend_by_ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, order: Order, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, likewise."""
    grad_q, grad_k, grad_v = _around(ring_backward(grad, q, torch.stack((k, v)), out, lse, order), group)
    return grad_q, grad_k, grad_v


# ---- All-gather: every rank's keys and values at once, and the same blocks. ----


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, order: Order, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp of this rank's queries over the keys and values of all ranks of `group`, gathered."""
    everyones = _gathered(k, v, group)
    state = _Forward(q, order)
    for source in order.sources():
        state.meet(source, everyones[source])
    return state.result()


def attend_gathered_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, order: Order, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, likewise."""
    everyones = _gathered(k, v, group)
    state = _Backward(grad, q, out, lse, order)
    shares = torch.zeros_like(everyones, dtype=wide_dtype(k.dtype))
    for source in order.sources():
        state.meet(source, everyones[source], shares[source])
    home = torch.empty_like(shares[0])
    _reduce_scatter(home, shares.flatten(0, 1), group=group)
    return state.result(home)


def _gathered(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    kv = torch.stack((k, v))
    everyones = torch.empty((dist.get_world_size(group), *kv.shape), dtype=kv.dtype, device=kv.device)
    all_gather(everyones.flatten(0, 1), kv, group=group)
    return everyones
