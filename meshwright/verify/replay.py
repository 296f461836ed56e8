"""Routing replayed: the experts that one process chose in float64, token by token, used by a run in fewer bits.

In fewer bits two layouts round scores differently, and where a token's scores are close it goes to other experts: a
large difference that is nobody's error. So a run in such a format is given the choice of the reference. It still
computes its scores, their weights and their gradients itself.

B batch, S sequence, K experts of a token.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.job import Job
from meshwright.model import routers
from meshwright.model.router import Routing
from meshwright.torch_private.autograd import in_backward

Moment = tuple[int, bool]
"""The last step that began, and whether its forward was that of training or of an evaluation after it."""


@dataclass
class Choices:
    """The experts of every token in one process."""

    by_layer: dict[int, dict[Moment, dict[int, Tensor]]] = field(default_factory=dict)
    """(S, K) by layer, moment and number of the sample."""

    def trained(self, layer: int) -> Tensor:
        """The experts of all tokens of a layer in all training steps, (tokens, K)."""
        moments = self.by_layer[layer].items()
        return torch.cat([chosen_SK for (_, trains), samples in moments if trains for chosen_SK in samples.values()])


@dataclass(frozen=True)
class Replayed:
    """How many choices of a run in training were not those of its own routers."""

    differing: int
    choices: int

    @classmethod
    def of(cls, ranks: Iterable["Replayed | None"]) -> "Replayed | None":
        """Of all ranks together; None where nothing was replayed."""
        parts = [part for part in ranks if part is not None]
        return cls(sum(part.differing for part in parts), sum(part.choices for part in parts)) if parts else None

    def __str__(self) -> str:
        return f"routing replayed: {self.differing:,} of {self.choices:,} choices would have differed"


def routes(job: Job) -> bool:
    """Whether a job's tokens choose among experts; a model of one's own may do so in its own way."""
    return job.model.experts is not None and job.model.file is None


class Recording:
    """Writes down the choice of one process, which runs its forwards one after the other."""

    def __init__(self) -> None:
        self.choices = Choices()
        self._moment: Moment = (0, False)
        self._sample_ids: list[int] = []

    def __call__(self, step: int | None, sample_ids_B: Tensor, places_S: Tensor) -> None:
        """A forward of these samples follows; nothing is replayed."""
        self._moment, self._sample_ids = _moment(step, self._moment), sample_ids_B.tolist()

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Record what the routers of a model choose from now on."""
        _watch(modules, self._see)

    def _see(self, layer: int, routing: Routing) -> None:
        samples = self.choices.by_layer.setdefault(layer, {}).setdefault(self._moment, {})
        samples.update(zip(self._sample_ids, routing.chosen_BSK.cpu().unbind(), strict=True))


class Replaying:
    """Gives the tokens of a rank the experts they had in another run, and counts those it would not have chosen."""

    def __init__(self, choices: Choices, device: torch.device) -> None:
        self._choices, self._device = choices, device
        self._moment: Moment = (0, False)
        self._differing = torch.zeros((), dtype=torch.int64, device=device)
        self._counted = 0

    @property
    def replayed(self) -> Replayed:
        """Of the training steps so far, on this rank."""
        return Replayed(int(self._differing), self._counted)

    def __call__(self, step: int | None, sample_ids_B: Tensor, places_S: Tensor) -> dict[int, Tensor]:
        """The experts of some places of some samples, by layer."""
        self._moment = _moment(step, self._moment)
        samples = sample_ids_B.tolist()
        # Blocks of extra tokens run in training alone.
        choices = self._choices.by_layer.items()
        recorded = {layer: moments[self._moment] for layer, moments in choices if self._moment in moments}
        return {
            layer: torch.stack([chosen[sample][places_S] for sample in samples]).to(self._device)
            for layer, chosen in recorded.items()
        }

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """Count what the routers of a model, or of some stages of it, would have chosen from now on."""
        _watch(modules, self._see)

    def _see(self, layer: int, routing: Routing) -> None:
        if torch.is_grad_enabled():
            same = (routing.chosen_BSK.unsqueeze(-1) == routing.own_BSK.unsqueeze(-2)).any(-1)
            self._differing += (~same).sum()
            self._counted += same.numel()


def _moment(step: int | None, last: Moment) -> Moment:
    return (last[0], False) if step is None else (step, True)


def _watch(modules: Sequence[nn.Module], see: Callable[[int, Routing], None]) -> None:
    """Call a function with every router's layer and result, except when a block is recomputed."""

    def hook(layer: int) -> Callable[[nn.Module, Any, Routing], None]:
        return lambda _router, _inputs, routing: None if in_backward() else see(layer, routing)

    for module in modules:
        for layer, router in routers(module):
            router.register_forward_hook(hook(layer))
