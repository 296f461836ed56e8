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

if TYPE_CHECKING:
    from meshwright.train.optimizer.adamw_kernel import Numbers, Tensors, Together


class _Updates(NamedTuple):
    """What one group's masters of one age need."""

    group: dict[str, Any]
    number: int
    counts: list[tuple[dict[str, Tensor], Tensor]]
    """Each master's states, and the count of steps that they have after this one. To add one to each in place takes the
    host a millisecond for 148 masters, in which a GPU has nothing to do."""
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
        self._launched = False

    def collect(self) -> None:
        """Look up what the next step will read and write: while a GPU computes the gradients, whose norm the step waits
        for, the host has time for it. `forget` it if there is no step."""
        from meshwright.train.optimizer.adamw_kernel import Tensors, joins_others, together

        self._collected = []
        for group in self.param_groups:
            by_age: dict[int, tuple[list[tuple[dict[str, Tensor], Tensor]], list[Tensors]]] = {}
            for master in group["params"]:
                if master.grad is None:
                    continue
                state = self._state(master)
                moments = (state["exp_avg"], state["exp_avg_sq"])
                update = Tensors(master, master.grad.contiguous(), *moments, self._working[master])
                number = int(state["step"]) + 1
                counts, updates = by_age.setdefault(number, ([], []))
                counts.append((state, torch.tensor(float(number))))
                updates.append(update)
            for number, (counts, updates) in by_age.items():
                small = [update for update in updates if joins_others(update)]
                alone = [update for update in updates if not joins_others(update)]
                self._collected.append(_Updates(group, number, counts, alone, together(small)))

    @torch.no_grad()
    def launch_if_finite(self, loss: Tensor, squares: Tensor, limit: float) -> None:
        """Launch what was collected before the host knows the loss and the sum of the gradients' squares: the GPU clips
        and changes nothing if they are not finite. Afterwards `step` counts the step, and `forget` does not."""
        norm = squares.sqrt()
        kept = torch.ones_like(norm)
        # `clip_factor`, of a norm that the host does not know.
        clipped = kept if limit <= 0 else torch.where(norm <= limit, kept, torch.full_like(norm, limit) / (norm + 1e-6))
        self._launch(torch.stack([clipped, (loss.isfinite() & norm.isfinite()).to(norm)]).float())

    def forget(self) -> None:
        """There is no step after `collect`: gradients need not be kept."""
        self._collected, self.factor, self._launched = None, 1.0, False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every master that has a gradient, and its working copy."""
        if self._collected is None:
            self.collect()
        if not self._launched:
            decision = torch.ones(2, device=self.param_groups[0]["params"][0].device)
            decision[0].fill_(self.factor)
            self._launch(decision)
        for updates in self._collected or ():
            for state, count in updates.counts:
                state["step"] = count
        self.forget()

    def _launch(self, decision: Tensor) -> None:
        """`decision` has the factor of the gradients, and zero if nothing is to be changed."""
        from meshwright.train.optimizer.adamw_kernel import launch, launch_together

        for updates in self._collected or ():
            numbers = self._numbers(updates.group, updates.number)
            for update in updates.alone:
                launch(update, decision, numbers)
            for them in updates.together:
                launch_together(them, decision, numbers)
        self._launched = True

    def _numbers(self, group: dict[str, Any], number: int) -> "Numbers":
        from meshwright.train.optimizer.adamw_kernel import Numbers

        (beta1, beta2), rate = group["betas"], float(group["lr"])
        return Numbers(
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
