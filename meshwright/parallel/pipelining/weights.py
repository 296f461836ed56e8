"""The weights of a rank that holds several pipeline stages, and parameters of which two stages hold a copy.

A copy is not a master: its gradient goes to the owner's rank, where the one update happens, and the new values come
back. Copies therefore cannot diverge, are counted and saved once, and need no optimizer states.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.shard_index import ShardIndex
from meshwright.parallel.weights import Weights
from meshwright.parallel.zero import ShardedWeights


@dataclass(frozen=True)
class Copy:
    """A parameter of one stage that another stage holds too, sharded over its ranks in the same way."""

    owner_stage: int
    owner_name: str
    stage: int
    name: str


class StagedWeights(Weights):
    """The masters of all stages of a rank under their one-device names; torch's runtime reduces their gradients."""

    def __init__(
        self,
        stages: dict[int, ShardedWeights],
        copies: list[Copy],
        stage_ranks: tuple[int, ...],
        group: dist.ProcessGroup,
    ) -> None:
        self._stages, self._copies, self._stage_ranks, self._group = stages, copies, stage_ranks, group
        self._rank = dist.get_rank(group)
        held = {(copy.stage, copy.name) for copy in copies}
        self.copied = [weights.masters[name] for stage, name in held if (weights := stages.get(stage)) is not None]
        self.masters: dict[str, nn.Parameter] = {}
        self._shards: dict[str, ShardIndex] = {}
        for stage, weights in stages.items():
            own = [name for name in weights.masters if (stage, name) not in held]
            self.masters |= {name: weights.masters[name] for name in own}
            self._shards |= {name: weights.shards()[name] for name in own}
        self.frozen = {name: tensor for weights in stages.values() for name, tensor in weights.frozen.items()}
        self.frozen_shards = {n: shard for weights in stages.values() for n, shard in weights.frozen_shards.items()}

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Give every stage's reduced gradients to the masters, those of copies to their owners."""
        for weights in self._stages.values():
            weights.collect_gradients()
        for copy in self._copies:
            here, there = self._master(copy.stage, copy.name), self._master(copy.owner_stage, copy.owner_name)
            given, total = (None if master is None else _gradient(master) for master in (here, there))
            arrived = self._moved(given, total, copy.stage, copy.owner_stage)
            if arrived is not None and there is not None and total is not None:
                there.grad = total.add_(arrived)

    @torch.no_grad()
    def refresh(self) -> None:
        """Send the owners' new values to the copies."""
        for copy in self._copies:
            here, there = self._master(copy.stage, copy.name), self._master(copy.owner_stage, copy.owner_name)
            arrived = self._moved(there, here, copy.owner_stage, copy.stage)
            if arrived is not None and here is not None:
                here.copy_(arrived)
        for weights in self._stages.values():
            weights.refresh()

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for weights in self._stages.values():
            weights.zero_gradients()

    def _master(self, stage: int, name: str) -> nn.Parameter | None:
        return self._stages[stage].masters[name] if stage in self._stages else None

    def _moved(self, values: Tensor | None, like: Tensor | None, source: int, target: int) -> Tensor | None:
        """The values on the target stage's rank, sent there where that is another one; None on all other ranks."""
        source_rank, target_rank = self._stage_ranks[source], self._stage_ranks[target]
        if source_rank == target_rank:
            return values
        if self._rank == source_rank and values is not None and values.numel():
            dist.send(values.detach().contiguous(), group=self._group, group_dst=target_rank)
        if self._rank == target_rank and like is not None and like.numel():
            arrived = torch.empty_like(like)
            dist.recv(arrived, group=self._group, group_src=source_rank)
            return arrived
        return None


def _gradient(master: nn.Parameter) -> Tensor:
    """A master's gradient; zero where no micro-batch of its stage used it, for one of its copy's may have."""
    return torch.zeros_like(master, dtype=master.grad_dtype) if master.grad is None else master.grad
