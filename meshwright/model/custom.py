"""A user's own model: one file with a `build` function and a sharding table."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from meshwright.cost import parameter_count
from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.model.decoder import Decoder
from meshwright.model.sharding import DECODER_SHARDING, ROLES, line_of, role_of


@dataclass(frozen=True)
class Architecture:
    """A model, on the device it was built on, with the roles of its modules."""

    model: nn.Module
    sharding: Mapping[str, str]

    def role(self, module: str) -> str | None:
        """A module's role by its dotted name."""
        return role_of(self.sharding, module)

    def line(self, module: str) -> str | None:
        """The line of the table that gives a module its role."""
        return line_of(self.sharding, module)

    def only(self, role: str, *, required: bool = True) -> str:
        """The name of the one module with a role; empty where a pipeline stage, which does not require it, has none."""
        names = [name for name, _ in self.model.named_modules() if self.role(name) == role]
        if len(names) > 1 or (required and not names):
            raise UserError(f'model.file: SHARDING names {len(names)} modules with the role "{role}"; name exactly one')
        return names[0] if names else ""


def build_architecture(shape: Model) -> Architecture:
    """The decoder of a shape, or what the file named by model.file builds for it."""
    if shape.file is None:
        return Architecture(Decoder(shape), DECODER_SHARDING)
    return _from_file(Path(shape.file), shape)


def count_parameters(shape: Model) -> int:
    """Every trainable element of what `build_architecture` would build."""
    if shape.file is None:
        return parameter_count(shape)
    with torch.device("meta"):
        return sum(p.numel() for p in build_architecture(shape).model.parameters())


def _from_file(path: Path, shape: Model) -> Architecture:
    if not path.is_file():
        raise UserError(
            f'model.file = "{path}" does not exist; give the path of a Python file that defines build(shape)'
        )
    spec = importlib.util.spec_from_file_location(f"meshwright_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f'model.file = "{path}" cannot be loaded ({type(error).__name__}: {error}); fix it') from error
    build, sharding = getattr(module, "build", None), getattr(module, "SHARDING", None)
    if not callable(build) or not isinstance(sharding, Mapping):
        raise UserError(f'model.file = "{path}" lacks build(shape) or the table SHARDING; define both')
    if wrong := {role for role in sharding.values() if role not in ROLES}:
        raise UserError(
            f'model.file = "{path}": SHARDING has the unknown role "{min(wrong)}"; use one of {", ".join(ROLES)}'
        )
    built = build(shape)
    if not isinstance(getattr(built, "layers", None), nn.ModuleDict):
        raise UserError(
            f'model.file = "{path}": the model it builds has no ModuleDict named layers; keep its blocks in one'
        )
    return Architecture(built, sharding)
