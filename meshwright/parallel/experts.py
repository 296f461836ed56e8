"""Expert parallelism: each rank holds some experts of every layer, and tokens travel to them and back.

R rows that this rank sends, Q rows that it receives, D width, N experts, M experts of a rank, P ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.job import Job
from meshwright.model import Router
from meshwright.model.moe import Compute, ExpertWeights, MixtureOfExperts, PackedLinear, permuted
from meshwright.parallel.context.order import zigzag_places
from meshwright.parallel.world import World, all_gather


def apply_expert_parallel(model: nn.Module, job: Job, world: World) -> None:
    """Give a rank its experts and let tokens travel to those of the others, in place; parameter names stay."""
    for module in model.modules():
        if isinstance(module, Router):
            _share_sequences(module, job, world)
        elif isinstance(module, MixtureOfExperts) and job.layout.ep > 1 and world.expert_mesh is not None:
            module.dispatch = Exchange(world.expert_mesh["ep"].get_group())
            module.dispatch_even = EvenExchange(world.expert_mesh["ep"].get_group())
            for packed in _packed(module.experts):
                for name, parameter in list(packed.named_parameters()):
                    placed = distribute_tensor(parameter, world.expert_mesh["ep"], [Shard(0)])
                    setattr(packed, name, nn.Parameter(placed))
                packed.own = _own


def reset_routers(model: nn.Module) -> None:
    """Give routers' buffers their first values once they have memory."""
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()


def _packed(experts: ExpertWeights) -> Iterator[PackedLinear]:
    yield from (module for module in experts.modules() if isinstance(module, PackedLinear))


def _own(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _share_sequences(router: Router, job: Job, world: World) -> None:
    """Tell a router what a sequence's losses count, and with whom this rank shares its sequences."""
    router.loss_share = 1.0 / job.batch.global_batch
    groups = [] if world.context_group is None else [world.context_group]
    if world.axis_size("tp") > 1 and world.mesh is not None:
        groups.append(world.mesh["tp"].get_group())
    router.sequence_parts = world.axis_size("cp") * world.axis_size("tp")
    if groups:
        router.sum_over_sequence = _SumOver(groups)
        if router.experts.capacity is not None:
            router.sequence_runs = _runs(world.axis_size("cp"))
            router.earlier_tokens = _Earlier(groups, job.batch.sequence_length, world)


class _SumOver:
    """The sum of a tensor over the ranks of several groups, one after the other."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups

    def __call__(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        for group in self._groups:
            dist.all_reduce(total, group=group)
        return total


def _runs(cp: int) -> int:
    """Stretches of neighbouring tokens on a rank: context parallelism gives it an early and a late one. Of these, tp
    ranks have slices; one that reaches into both has equally much of each."""
    return 2 if cp > 1 else 1


def run_starts(sequence: int, cp: int, tp: int) -> list[int]:
    """The position at which each run begins, by cp rank, then tp rank, then run."""
    starts = []
    for rank in range(cp):
        places = zigzag_places(sequence, rank, cp) if cp > 1 else torch.arange(sequence)
        runs = [run for part in places.chunk(tp) for run in part.tensor_split(_runs(cp))]
        starts += [int(run[0]) if len(run) else sequence for run in runs]
    return starts


class _Earlier:
    """How many tokens before each run of this rank's tokens chose each expert, counted over the ranks that share its
    sequences."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], sequence: int, world: World) -> None:
        cp, tp = world.axis_size("cp"), world.axis_size("tp")
        starts = run_starts(sequence, cp, tp)
        order = sorted(range(len(starts)), key=starts.__getitem__)
        first = (world.axis_rank("cp") * tp + world.axis_rank("tp")) * _runs(cp)
        own = [order.index(first + run) for run in range(_runs(cp))]
        self._groups = groups
        self._order, self._own = torch.tensor(order, device=world.device), torch.tensor(own, device=world.device)

    def __call__(self, counts_HBN: Tensor) -> Tensor:
        everyones = counts_HBN
        for group in reversed(self._groups):  # tp ranks are next to each other
            gathered = everyones.new_empty(group.size() * len(everyones), *everyones.shape[1:])
            all_gather(gathered, everyones.contiguous(), group=group)
            everyones = gathered
        in_order = everyones[self._order]
        return (in_order.cumsum(0) - in_order)[self._own]


class Exchange:
    """Sends rows to the ranks of their experts, lets them compute, and brings the results back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, group.size()

    def __call__(self, rows_RD: Tensor, counts_N: Tensor, compute: Compute) -> Tensor:
        counts_PM = counts_N.view(self._ranks, -1)
        arriving_PM = torch.empty_like(counts_PM)
        dist.all_to_all_single(arriving_PM, counts_PM.contiguous(), group=self._group)
        # The only place where the host waits for the device: both numbers of rows in one transfer.
        sent, received = torch.stack([counts_PM.sum(1), arriving_PM.sum(1)]).tolist()
        arrived_QD = _exchanged(rows_RD, sent, received, self._group)
        order, inverse = _by_expert(arriving_PM)
        out_QD = compute(permuted(arrived_QD, order, inverse), arriving_PM.sum(0))
        return _exchanged(permuted(out_QD, inverse, order), received, sent, self._group)


class EvenExchange:
    """As `Exchange` for equally many rows of every expert on every rank: no counts travel, and the host never waits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, group.size()

    def __call__(self, rows_RD: Tensor, counts_N: Tensor, compute: Compute) -> Tensor:
        experts = len(counts_N) // self._ranks
        splits = [len(rows_RD) // self._ranks] * self._ranks
        arrived_RD = _exchanged(rows_RD, splits, splits, self._group)
        out_RD = compute(_swapped(arrived_RD, self._ranks, experts), counts_N.view(self._ranks, -1).sum(0))
        return _exchanged(_swapped(out_RD, experts, self._ranks), splits, splits, self._group)


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Rows that are sorted by one number and then by another, with equally many of each pair, sorted the other way."""
    return rows.reshape(outer, inner, -1, rows.shape[-1]).transpose(0, 1).flatten(0, 2)


def _by_expert(arriving_PM: Tensor) -> tuple[Tensor, Tensor]:
    """The order that sorts arrived rows, which come sorted by rank and then by expert, by expert; and its inverse."""
    ranks, experts = arriving_PM.shape
    numbers = torch.arange(experts, device=arriving_PM.device).repeat(ranks)
    order = torch.repeat_interleave(numbers, arriving_PM.flatten()).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _Exchanged.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


class _Exchanged(torch.autograd.Function):
    """The first rows go to the first rank, and so on; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None
