"""Master weights in fp32 and, below fp32, a working copy of them that the model computes with."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Weights:
    """The fp32 masters of a model; the model itself holds them, or a 16-bit working copy when compute is lower.

    Gradients of the working copy are moved into the masters' fp32 gradients as soon as backward makes them, so that
    accumulation over micro-batches never adds in 16 bits and no second set of gradients stays alive.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
        self.masters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._working: list[Tensor] = []
        if compute != torch.float32:
            self._split(compute)

    def _split(self, compute: torch.dtype) -> None:
        for name, parameter in list(self.masters.items()):
            master = nn.Parameter(parameter.data)
            parameter.data = parameter.data.to(compute)
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))  # type: ignore[no-untyped-call]
            self.masters[name] = master
            self._working.append(parameter)

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive the working copy anew; call it after the masters changed."""
        if self._working:
            torch._foreach_copy_(self._working, list(self.masters.values()))

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for master in self.masters.values():
            master.grad = None


def _move_gradient_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
