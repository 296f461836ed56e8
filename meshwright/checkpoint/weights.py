"""The weights of a checkpoint in a model: fp32 masters under the model's own names, tied tables once."""

from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.checkpoint.catalogue import newest_weights
from meshwright.checkpoint.hf_read import HfWeights
from meshwright.checkpoint.reading import Checkpoint
from meshwright.errors import UserError
from meshwright.model import Decoder, routers

PREFERENCE = "routing/preference"
"""The routers' preferences of a model with experts, layer by layer: no weights, but part of what it computes."""
_ROWS = 4096
"""Read at a time, so that no whole table is held twice."""


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> int:
    """Fill a model's parameters and return the step; names or shapes that differ are refused."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    require_shapes(checkpoint, {name: tuple(parameter.shape) for name, parameter in parameters.items()}, whole=True)
    with checkpoint, torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(checkpoint.whole(f"model/{name}"))
        if checkpoint.names(PREFERENCE):
            preference_LN = checkpoint.whole(PREFERENCE)
            for layer, router in routers(model):
                router.preference.copy_(preference_LN[layer])
    return checkpoint.facts.step


def load_hf_weights(folder: Path, model: Decoder) -> None:
    """Fill a model's parameters from a Hugging Face folder; incomplete weights are refused."""
    source = HfWeights(folder, model.shape)
    source.require()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = tuple(parameter.shape)
            for start in range(0, size[0], _ROWS):
                rows = slice(start, min(start + _ROWS, size[0]))
                parameter[rows] = source.rows(name, size, rows).to(parameter.device)
        if (preferences_LN := source.preferences()) is not None:
            for layer, router in routers(model):
                router.preference.copy_(preferences_LN[layer])


class StoredWeights:
    """The weights of a checkpoint, else of a run's newest complete one, any window of any parameter at a time."""

    def __init__(self, run: Path, checkpoint: Checkpoint | None = None) -> None:
        if checkpoint is not None:
            checkpoint.verify(group="model")
        self._checkpoint = checkpoint or newest_weights(run)
        self.step = self._checkpoint.facts.step
        names = self._checkpoint.names("model/")
        self.sizes = {name.removeprefix("model/"): self._checkpoint.shape(name) for name in names}

    def read(self, name: str, window: tuple[slice, ...]) -> Tensor:
        """A window of a parameter's fp32 master."""
        sizes = self.sizes[name]
        spans = (*window, *(slice(None) for _ in sizes[len(window) :]))
        box = [slice(*span.indices(size)[:2]) for span, size in zip(spans, sizes, strict=True)]
        with self._checkpoint:  # files that stay open stay mapped, and would count as used memory
            return self._checkpoint.read(f"model/{name}", box)

    def preferences(self) -> Tensor:
        """The routers' preferences of all layers (layers, experts) of a model with experts."""
        with self._checkpoint:
            return self._checkpoint.whole(PREFERENCE)


def require_shapes(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], *, whole: bool) -> None:
    """Refuse a model whose parameters differ from the checkpoint's; a pipeline stage holds only some of them."""
    saved = {name.removeprefix("model/") for name in checkpoint.names("model/")}
    odd = shapes.keys() ^ saved if whole else shapes.keys() - saved
    if odd:
        raise UserError(
            f"{checkpoint.path} does not match the model: only one of them has {min(odd)}; use the job's own model "
            "section"
        )
    for name, shape in shapes.items():
        if (found := checkpoint.shape(f"model/{name}")) != shape:
            raise UserError(
                f"{checkpoint.path}: {name} has shape {found}, but the model needs {shape}; use the job's own model "
                "section"
            )
