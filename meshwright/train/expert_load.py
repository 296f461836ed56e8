"""The load of experts over a step: counted by the routers, summed over all ranks, and balanced without a loss.

L layers, N experts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.job import Job
from meshwright.model import routers
from meshwright.model.adapter import is_frozen
from meshwright.parallel import World


@dataclass(frozen=True)
class Load:
    """Tokens that chose every expert in one step; layers without experts have none."""

    tokens_LN: Tensor
    dropped_L: Tensor | None = None
    """Of these, how many were dropped; None without experts.capacity."""

    def row(self) -> dict[str, float]:
        """The load as metrics of a step."""
        shares_LN = self.tokens_LN.double() / self.tokens_LN.sum(1, keepdim=True)
        count = self.tokens_LN.shape[1]
        entropy_L = -(shares_LN * shares_LN.clamp(min=1e-300).log()).sum(1) / math.log(max(count, 2))
        row = {
            "expert_imbalance": float(shares_LN.amax(1).mean() * count),
            "expert_entropy": float(entropy_L.mean()),
            "idle_experts": int((self.tokens_LN == 0).sum()),
        }
        if self.dropped_L is not None:
            row["expert_dropped"] = float(self.dropped_L.sum() / self.tokens_LN.sum())
        return row

    def event(self) -> dict[str, Any]:
        """The load of every expert, as an event of a run."""
        dropped = {} if self.dropped_L is None else {"dropped": self.dropped_L.tolist()}
        return {"tokens": self.tokens_LN.tolist(), **dropped}


class ExpertLoad:
    """Collects what the routers of all ranks counted, and moves their preferences towards equal loads."""

    def __init__(self, job: Job, modules: list[nn.Module], world: World) -> None:
        assert job.model.experts is not None
        self._experts, self._world, self._batch = job.model.experts, world, job.batch.global_batch
        self._dense, self._frozen = self._experts.first_dense, is_frozen(job.model, "layers.0.router")
        self._routers = [found for module in modules for found in routers(module)]
        size = (job.model.blocks, self._experts.count)
        self.preference_LN = torch.zeros(size, device=world.device)
        """Of all layers, the same on every rank."""
        for layer, router in self._routers:
            self.preference_LN[layer] = router.preference

    def scale_losses(self, scale: float) -> None:
        """Give the routers' losses the scale that the step's loss has."""
        for _, router in self._routers:
            router.loss_share = scale / self._batch

    def settle(self, *, updated: bool) -> Load:
        """The loads of the step that has ended, counted anew from now on; preferences follow if weights were updated,
        unless the routers' are frozen.

        All ranks call this together.
        """
        counted = self.take()
        if self._world.size > 1:
            dist.all_reduce(counted)
        if updated and self._experts.balance_rate and not self._frozen:
            tokens_LN = counted[self._dense :, :-1]
            behind = torch.sign(tokens_LN.double().mean(1, keepdim=True) - tokens_LN).to(self.preference_LN.dtype)
            self.preference_LN[self._dense :] += self._experts.balance_rate * behind
            self.prefer(self.preference_LN)
        return self.load_of(counted.cpu())

    def take(self) -> Tensor:
        """What this rank's routers counted since the last time: every layer's tokens of each expert, and the dropped
        ones."""
        layers, count = self.preference_LN.shape
        counted = torch.zeros(layers, count + 1, dtype=torch.int64, device=self._world.device)
        for layer, router in self._routers:
            counted[layer, :count] += router.load
            counted[layer, count] += router.dropped
            router.load.zero_()
            router.dropped.zero_()
        return counted

    def load_of(self, counted: Tensor) -> Load:
        """The load, of what all ranks counted."""
        tokens_LN, dropped_L = counted[self._dense :, :-1], counted[self._dense :, -1]
        return Load(tokens_LN, None if self._experts.capacity is None else dropped_L)

    def prefer(self, preference_LN: Tensor) -> None:
        """Set the preferences of all routers."""
        self.preference_LN.copy_(preference_LN)
        for layer, router in self._routers:
            router.preference.copy_(self.preference_LN[layer])
