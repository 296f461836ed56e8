"""AdamW on one GPU in one pass over memory: gradient, moments and master are read once, the working copy is written
with them, and clipping is applied as a factor.

torch's fused AdamW needs gradients as wide as the masters and has no working copy: widening, clipping and deriving the
copy are separate passes, 9 ms on top of its own 12 for 1.5e9 parameters on an H200. States are those of torch's AdamW.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from meshwright.train.optimizer.adamw_kernel import Numbers


class OnePassAdamW(torch.optim.Optimizer):
    """AdamW over fp32 masters on a GPU, with a working copy of each in fewer bits."""

    writes_working_copies = True
    factor = 1.0
    """The factor applied to the next step's gradients."""

    def __init__(self, groups: list[dict[str, Any]], working: Mapping[nn.Parameter, Tensor], **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self._working = working

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every master that has a gradient, and its working copy."""
        from meshwright.train.optimizer.adamw_kernel import Tensors, joins_others, launch, launch_together

        for group in self.param_groups:
            together: dict[int, list[Tensors]] = {}
            for master in group["params"]:
                if master.grad is None:
                    continue
                state = self._state(master)
                state["step"] += 1
                number, moments = int(state["step"]), (state["exp_avg"], state["exp_avg_sq"])
                update = Tensors(master, master.grad.contiguous(), *moments, self._working[master])
                if joins_others(update):
                    together.setdefault(number, []).append(update)
                else:  # launch large ones at once, to keep the device busy while the others are collected
                    launch(update, self._numbers(group, number))
            for number, updates in together.items():
                launch_together(updates, self._numbers(group, number))
        self.factor = 1.0

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
