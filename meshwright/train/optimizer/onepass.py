"""AdamW on one GPU in one pass over memory: gradient, moments and master are read once, the working copy written with
them, and clipping is a factor on the way.

torch's fused AdamW wants gradients as wide as the masters and knows no working copy: widening, clipping and deriving
the copy are passes of their own, 9 ms beside its own 12 for 1.5e9 parameters on an H200. States are torch's AdamW's.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class OnePassAdamW(torch.optim.Optimizer):
    """AdamW over fp32 masters on a GPU, with a working copy of each in fewer bits."""

    writes_working_copies = True
    factor = 1.0
    """What the next step's gradients are multiplied by."""

    def __init__(self, groups: list[dict[str, Any]], working: Mapping[nn.Parameter, Tensor], **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self._working = working

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every master that has a gradient, and its working copy."""
        from meshwright.train.optimizer.adamw_kernel import Numbers, Tensors, launch

        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], float(group["lr"])
            by_number: dict[int, list[Tensors]] = {}
            for master in group["params"]:
                if master.grad is None:
                    continue
                state = self._state(master)
                state["step"] += 1
                moments = state["exp_avg"], state["exp_avg_sq"]
                update = Tensors(master, master.grad.contiguous(), *moments, self._working[master])
                by_number.setdefault(int(state["step"]), []).append(update)
            for number, updates in by_number.items():
                numbers = Numbers(
                    factor=self.factor,
                    kept=1.0 - rate * group["weight_decay"],
                    rate=rate / (1.0 - beta1**number),
                    beta1=beta1,
                    beta2=beta2,
                    root2=math.sqrt(1.0 - beta2**number),
                    eps=group["eps"],
                )
                launch(updates, numbers)
        self.factor = 1.0

    def _state(self, master: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[master]
        if not state:
            state["step"] = torch.zeros(())  # a CPU tensor: read every step without waiting for the device
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state
