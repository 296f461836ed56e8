"""The weights of a checkpoint in a model: fp32 masters under the model's own names, tied tables once."""

from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.base import Rows, base_fingerprint, frozen_rows, require_base
from meshwright.checkpoint.catalogue import newest_weights
from meshwright.checkpoint.hf_read import HfWeights
from meshwright.checkpoint.reading import Checkpoint
from meshwright.errors import UserError
from meshwright.model import Decoder, routers
from meshwright.model.adapter import is_frozen

PREFERENCE = "routing/preference"
"""The routers' preferences of a model with experts, layer by layer: no weights, but part of what it computes."""
_ROWS = 4096
"""Read at a time, so that no whole table is held twice."""


def load_weights(checkpoint: Checkpoint, model: Decoder, seed: int = 0) -> int:
    """Fill a model's parameters and return the step; names or shapes that differ are refused.

    What is not trained comes from where the run had it from, and is drawn by the seed if it came from nowhere.
    """
    shape = model.shape
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if not is_frozen(shape, name)}
    require_shapes(checkpoint, {name: tuple(parameter.shape) for name, parameter in trained.items()}, whole=True)
    if shape.freezes:
        require_base(checkpoint, shape, base_fingerprint(shape, seed))
        _fill(frozen_rows(shape, seed), {name: p for name, p in parameters.items() if name not in trained})
    with checkpoint, torch.no_grad():
        for name, parameter in trained.items():
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
    _fill(source.rows, dict(model.named_parameters()))
    with torch.no_grad():
        if (preferences_LN := source.preferences()) is not None:
            for layer, router in routers(model):
                router.preference.copy_(preferences_LN[layer])


@torch.no_grad()
def _fill(rows_of: Rows, parameters: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        size = tuple(parameter.shape)
        for start in range(0, size[0], _ROWS):
            rows = slice(start, min(start + _ROWS, size[0]))
            parameter[rows] = rows_of(name, size, rows).to(parameter.device)


class StoredWeights:
    """The weights of a checkpoint, else of a run's newest complete one, any window of any parameter at a time."""

    def __init__(self, run: Path, checkpoint: Checkpoint | None = None) -> None:
        if checkpoint is not None:
            checkpoint.verify(group="model")
        self.checkpoint = checkpoint or newest_weights(run)
        self.step = self.checkpoint.facts.step
        names = self.checkpoint.names("model/")
        self.sizes = {name.removeprefix("model/"): self.checkpoint.shape(name) for name in names}

    def read(self, name: str, window: tuple[slice, ...]) -> Tensor:
        """A window of a parameter's fp32 master."""
        sizes = self.sizes[name]
        spans = (*window, *(slice(None) for _ in sizes[len(window) :]))
        box = [slice(*span.indices(size)[:2]) for span, size in zip(spans, sizes, strict=True)]
        with self.checkpoint:  # files that stay open stay mapped, and would count as used memory
            return self.checkpoint.read(f"model/{name}", box)

    def preferences(self) -> Tensor:
        """The routers' preferences of all layers (layers, experts) of a model with experts."""
        with self.checkpoint:
            return self.checkpoint.whole(PREFERENCE)


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
