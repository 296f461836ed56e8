"""The weights of a checkpoint in a model: fp32 masters under the model's own names, tied tables once."""

import torch
from torch import Tensor, nn

from meshwright.checkpoint.reading import Checkpoint
from meshwright.errors import UserError


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> int:
    """Fill a model's parameters and return the step; names or shapes that differ are refused."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    require_shapes(checkpoint, {name: tuple(parameter.shape) for name, parameter in parameters.items()}, whole=True)
    with checkpoint, torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(checkpoint.whole(f"model/{name}"))
    return checkpoint.facts.step


def require_shapes(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], *, whole: bool) -> None:
    """Refuse a model whose parameters are not those of the checkpoint; a pipeline stage holds only some of them."""
    saved = {name.removeprefix("model/") for name in checkpoint.names("model/")}
    odd = shapes.keys() ^ saved if whole else shapes.keys() - saved
    if odd:
        raise UserError(
            f"{checkpoint.path} does not fit the model: {min(odd)} is on one side only; use the job's own model section"
        )
    for name, shape in shapes.items():
        if (found := checkpoint.shape(f"model/{name}")) != shape:
            raise UserError(
                f"{checkpoint.path}: {name} has shape {found}, the model's is {shape}; use the job's own model section"
            )
