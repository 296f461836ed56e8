"""A pipeline stage: the single-device model with everything else taken out."""

from torch import nn

from meshwright.model import Architecture


def keep_stage(architecture: Architecture, layers: range, first: bool, last: bool) -> None:
    """Take everything out of a model that is not part of a stage; what stays keeps its name.

    What looks tokens and positions up belongs to the first stage, everything else beside the layers to the last.
    """
    model = architecture.model
    blocks = model.layers
    assert isinstance(blocks, nn.ModuleDict)
    for name in [name for name in blocks if int(name) not in layers]:
        del blocks[name]
    for name, child in list(model.named_children()):
        if child is blocks or not any(True for _ in child.parameters()):
            continue
        looks_up = architecture.sharding.get(name) in ("vocabulary", "positions")
        if not (first if looks_up else last):
            setattr(model, name, None)
