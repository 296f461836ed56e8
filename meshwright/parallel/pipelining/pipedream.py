"""PipeDream: one stage of an asynchronous pipeline, in which every mini-batch keeps the weights its forward saw.

A stage updates itself after each of its backwards and never waits for the pipeline to empty. Mini-batches in flight
meanwhile finish with the weights they started with: each such state of the weights is a version. The stages after the
first are less stale; the last is not stale at all.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.data import Batch, Step
from meshwright.job import Job
from meshwright.parallel.inputs import Inputs
from meshwright.parallel.pipelining.stages import StageChain
from meshwright.parallel.weights import WholeWeights
from meshwright.parallel.world import World
from meshwright.pipeline import Action, Kind, build_table


@dataclass(frozen=True, eq=False)
class Version:
    """The stage's parameters in the compute format after some number of updates; never written to."""

    tensors: dict[str, Tensor]


class VersionedWeights(WholeWeights):
    """The masters of a stage and the versions of them that are still needed."""

    def __init__(self, model: nn.Module, master: torch.dtype, compute: torch.dtype) -> None:
        super().__init__(model, master)
        self._compute = compute
        self._newest: Version | None = None
        self._alive: WeakSet[Version] = WeakSet()
        self.most_versions = 0
        """Most versions that were ever in memory at once."""

    @property
    def newest(self) -> Version:
        """What the next forward uses."""
        assert self._newest is not None
        return self._newest

    def refresh(self) -> None:
        """Create a version of the masters as they are now."""
        self._newest = None  # freed first: if no mini-batch needs it, its memory is free for the next
        self.most_versions = max(self.most_versions, len(self._alive) + 1)
        copies = {name: p.detach().to(self._compute, copy=True).requires_grad_() for name, p in self.masters.items()}
        self._newest = Version(copies)
        self._alive.add(self._newest)


@dataclass(frozen=True)
class StageResult:
    """What a backward reports: the step's loss, squared gradient norms of this stage and of it with all after it, and
    the sum of these stages' counts."""

    loss: float
    own_squares: float
    squares: float
    counts: list[float]


@dataclass(frozen=True)
class _Flight:
    """A mini-batch between its forward and its backward."""

    version: Version
    given: Tensor
    result: Tensor


class PipeDream:
    """One stage between its neighbours; the loop takes `actions` and runs them."""

    def __init__(
        self, job: Job, world: World, model: nn.Module, weights: VersionedWeights, compute: torch.dtype
    ) -> None:
        self.weights = weights
        self.counted = 0
        """How many counts of a step are summed over the stages, in addition to its loss and norm."""
        self.modules: list[nn.Module] = [_Newest(model, weights)]
        self._model, self._device = model, world.device
        self._inputs = Inputs(job, world)
        self._rank, self._ranks = world.axis_rank("pp"), world.axis_size("pp")
        self._first, self._last = self._rank == 0, self._rank == self._ranks - 1
        self._chain = StageChain(job, world, {self._rank: self.modules[0]}, tuple(range(self._ranks)), compute)
        self._in_flight: dict[int, _Flight] = {}
        # A group for each direction: in one, NCCL would hold each of two neighbours' sends until the other receives.
        forth, back = self._chain.group, dist.new_group()
        # A rank is ahead by at most its distance from the end, so a message this far back has arrived.
        most = 4 * self._ranks
        self._to_next, self._to_previous = _Outbox(forth, self._rank + 1, most), _Outbox(back, self._rank - 1, most)
        self._from_previous, self._from_next = _Inbox(forth, self._rank - 1), _Inbox(back, self._rank + 1)

    def actions(self, steps: range) -> Iterator[tuple[Kind, int]]:
        """What this rank does for some steps, in order; the pipeline is empty before and after.

        What an action needs from a neighbour is requested while the previous one runs.
        """
        order = build_table("pipedream", self._ranks, len(steps)).orders[self._rank]
        self._expect(order[0])
        for action, following in zip_longest(order, order[1:]):
            if following is not None:
                self._expect(following)
            yield action.kind, steps[action.micro_batch]
        self._to_next.flush()
        self._to_previous.flush()

    def _expect(self, action: Action) -> None:
        hidden = torch.empty(self._chain.hidden_shape, dtype=self._chain.compute, device=self._device)
        if action.kind is Kind.FORWARD and not self._first:
            self._from_previous.expect(hidden)
        elif action.kind is Kind.BACKWARD and not self._last:
            self._from_next.expect(hidden)
            self._from_next.expect(torch.empty(2 + self.counted, dtype=torch.float64, device=self._device))

    def forward(self, data: Step, step: int) -> None:
        """The step's mini-batch through this stage with the newest weights, and on to the next stage."""
        tokens, arguments = self._inputs.training(data.batch, data.valid_count, torch.tensor(step))
        given = tokens if self._first else self._from_previous.take().requires_grad_()
        version = self.weights.newest
        result: Tensor = functional_call(self._model, version.tensors, (given,), arguments)
        if not self._last:
            self._to_next.send(result)
        self._in_flight[step] = _Flight(version, given, result)

    def backward(self, step: int, counts: Tensor | None = None) -> StageResult:
        """The step's gradients with the weights its forward saw; afterwards the masters have them. `counts` are this
        stage's."""
        flight = self._in_flight.pop(step)
        parameters = list(flight.version.tensors.values())
        sources = parameters if self._first else [*parameters, flight.given]
        arriving = None if self._last else self._from_next.take()
        gradients: Sequence[Tensor | None] = torch.autograd.grad(flight.result, sources, arriving, allow_unused=True)
        if not self._first:
            self._to_previous.send(cast(Tensor, gradients[-1]))
        for master, gradient in zip(self.weights.masters.values(), gradients[: len(parameters)], strict=True):
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self.weights.collect_gradients()
        return self._report(flight.result, counts)

    def _report(self, result: Tensor, counts: Tensor | None) -> StageResult:
        """This stage's numbers with those of the stages after it, passed to the one before."""
        own = self.weights.square_sum()
        totals = torch.stack([result.detach().double() if self._last else torch.zeros_like(own), own])
        if counts is not None:
            totals = torch.cat((totals, counts.flatten().double()))
        if not self._last:
            totals += self._from_next.take()
        if not self._first:
            self._to_previous.send(totals)
        loss, squares, *counted = totals.tolist()
        if not totals.isfinite().all():
            self._to_previous.flush()  # this rank may be about to stop, and earlier ones must know why
        return StageResult(loss, float(own), squares, counted)

    def held_out(self, batches: Sequence[Batch]) -> list[Tensor]:
        """The loss sums of some batches with the newest weights, on the last rank; only while nothing is in flight."""
        return self._chain.held_out(batches)


class _Newest(nn.Module):
    """The stage's model with the newest version of its weights."""

    def __init__(self, model: nn.Module, weights: VersionedWeights) -> None:
        super().__init__()
        self._model, self._weights = model, weights

    @property
    def layers(self) -> nn.Module:
        """The stage's blocks, under the name that every model has them."""
        return self._model.get_submodule("layers")

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        result: Tensor = functional_call(self._model, self._weights.newest.tensors, (x,), arguments)
        return result


class _Outbox:
    """Non-blocking sends to a neighbour, up to a number of them in flight."""

    def __init__(self, group: dist.ProcessGroup, target: int, most: int) -> None:
        self._group, self._target, self._most = group, target, most
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, message: Tensor) -> None:
        """Start sending."""
        sent = message.detach().contiguous()  # kept with its handle: it must outlive the transfer
        self._under_way.append((dist.isend(sent, group=self._group, group_dst=self._target), sent))
        while len(self._under_way) > self._most:
            self._under_way.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until everything has arrived."""
        while self._under_way:
            self._under_way.popleft()[0].wait()


class _Inbox:
    """Messages from a neighbour, requested before they are needed and taken in the same order."""

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self._group, self._source = group, source
        self._coming: deque[tuple[Any, Tensor]] = deque()

    def expect(self, buffer: Tensor) -> None:
        """Receive the next message into this tensor."""
        self._coming.append((dist.irecv(buffer, group=self._group, group_src=self._source), buffer))

    def take(self) -> Tensor:
        """The oldest requested message, once it has arrived."""
        handle, message = self._coming.popleft()
        handle.wait()
        return message
