"""The face of a model's weights, and its one-device form: fp32 masters and, below fp32, a working copy of them."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.parallel.pieces import Piece, piece_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Weights(Protocol):
    """What the loop needs of a model's weights, on one device or as one rank's shards."""

    masters: dict[str, nn.Parameter]
    """What the optimizer updates, by the parameters' names: plain tensors of this device."""

    def begin_micro_batch(self, last: bool) -> None:
        """Called before every micro-batch of a step."""

    def collect_gradients(self) -> None:
        """Called after the last backward: the masters have their gradients then."""

    def refresh(self) -> None:
        """Called after the masters changed."""

    def zero_gradients(self) -> None:
        """Forget all gradients."""

    def pieces(self) -> dict[str, Piece]:
        """Where each master lies in its whole parameter."""

    def square_sum(self) -> Tensor:
        """This rank's share of the squared gradient norm: the sum over all ranks is the whole."""


class WholeWeights:
    """The weights of a model on one device; the model computes with them, or with a working copy in lower precision.

    Gradients of the working copy are moved into the masters' gradients as soon as backward makes them, so that
    accumulation over micro-batches never adds in 16 bits and no second set of gradients stays alive.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
        self.masters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._pieces = {name: piece_of(p, tuple(p.shape)) for name, p in self.masters.items()}
        self._working: list[Tensor] = []
        if any(compute != p.dtype for p in self.masters.values()):
            self._split(compute)

    def _split(self, compute: torch.dtype) -> None:
        for name, parameter in list(self.masters.items()):
            master = nn.Parameter(parameter.data)
            parameter.data = parameter.data.to(compute)
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))  # type: ignore[no-untyped-call]
            self.masters[name] = master
            self._working.append(parameter)

    def begin_micro_batch(self, last: bool) -> None:
        """Nothing to prepare on one device."""

    def collect_gradients(self) -> None:
        """Nothing to collect: backward put the gradients where they belong."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive the working copy anew."""
        if self._working:
            torch._foreach_copy_(self._working, list(self.masters.values()))

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for master in self.masters.values():
            master.grad = None

    def pieces(self) -> dict[str, Piece]:
        """Every master is its whole parameter."""
        return self._pieces

    def square_sum(self) -> Tensor:
        """The squared gradient norm."""
        return square_sum(self.masters, self._pieces)


def square_sum(masters: dict[str, nn.Parameter], pieces: dict[str, Piece]) -> Tensor:
    """Σ gradient² over the masters in float64, each divided by the number of ranks that hold the same piece."""
    named = [(name, p.grad) for name, p in masters.items() if p.grad is not None]
    norms = torch.stack(torch._foreach_norm([gradient for _, gradient in named])).double()
    copies = torch.tensor([pieces[name].copies for name, _ in named], dtype=torch.float64, device=norms.device)
    return (norms.square() / copies).sum()


def _move_gradient_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
