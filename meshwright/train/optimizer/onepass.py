"""AdamW on one GPU in one pass over memory: gradient, moments and master are read once, the working copy is written
with them, and clipping is applied as a factor.

torch's fused AdamW needs gradients as wide as the masters and has no working copy: widening, clipping and deriving the
copy are separate passes, 9 ms on top of its own 12 for 1.5e9 parameters on an H200. States are those of torch's AdamW.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.torch_private.arithmetic import foreach_add_

if TYPE_CHECKING:
    from meshwright.train.optimizer.adamw_kernel import Numbers, Tensors, Together


class _Updates(NamedTuple):
    """What one group's masters of one age need."""

    group: dict[str, Any]
    number: int
    states: list[dict[str, Tensor]]
    alone: "list[Tensors]"
    together: "list[Together]"


class OnePassAdamW(torch.optim.Optimizer):
    """AdamW over fp32 masters on a GPU, with a working copy of each in fewer bits."""

    writes_working_copies = True
    factor = 1.0
    """The factor applied to the next step's gradients."""

    def __init__(self, groups: list[dict[str, Any]], working: Mapping[nn.Parameter, Tensor], **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self._working = working
        self._collected: list[_Updates] | None = None

    def collect(self) -> None:
        """Look up what the next step will read and write: while a GPU computes the gradients, whose norm the step waits
        for, the host has time for it. `forget` it if there is no step."""
        from meshwright.train.optimizer.adamw_kernel import Tensors, joins_others, together

        self._collected = []
        for group in self.param_groups:
            by_age: dict[int, tuple[list[dict[str, Tensor]], list[Tensors]]] = {}
            for master in group["params"]:
                if master.grad is None:
                    continue
                state = self._state(master)
                moments = (state["exp_avg"], state["exp_avg_sq"])
                update = Tensors(master, master.grad.contiguous(), *moments, self._working[master])
                states, updates = by_age.setdefault(int(state["step"]) + 1, ([], []))
                states.append(state)
                updates.append(update)
            for number, (states, updates) in by_age.items():
                small = [update for update in updates if joins_others(update)]
                alone = [update for update in updates if not joins_others(update)]
                self._collected.append(_Updates(group, number, states, alone, together(small)))

    def forget(self) -> None:
        """There is no step after `collect`: gradients need not be kept."""
        self._collected, self.factor = None, 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every master that has a gradient, and its working copy."""
        from meshwright.train.optimizer.adamw_kernel import launch, launch_together

        if self._collected is None:
            self.collect()
        for updates in self._collected or ():
            numbers = self._numbers(updates.group, updates.number)
            for update in updates.alone:
                launch(update, numbers)
            for them in updates.together:
                launch_together(them, numbers)
        if counts := [state["step"] for updates in self._collected or () for state in updates.states]:
            foreach_add_(counts, 1)
        self.forget()

    def _numbers(self, group: dict[str, Any], number: int) -> "Numbers":
        from meshwright.train.optimizer.adamw_kernel import Numbers

        (beta1, beta2), rate = group["betas"], float(group["lr"])
        return Numbers(
            factor=self.factor,
            kept=1.0 - rate * group["weight_decay"],
            rate=rate / (1.0 - beta1**number),
            beta1=beta1,
            beta2=beta2,
            root2=math.sqrt(1.0 - beta2**number),
            eps=group["eps"],
        )

    def _state(self, master: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[master]
        if not state:
            state["step"] = torch.zeros(())  # a CPU tensor: read every step without waiting for the device
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state
