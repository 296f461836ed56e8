"""The user's own encoder: one Python file with a class that cooks records, makes items, or both."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Protocol

from meshwright.data.media.chance import Chance
from meshwright.errors import UserError


class Encoder(Protocol):
    """What a class in the user's file may have; either method may be missing."""

    def cook(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record as it was read (the members of a tar by their endings) in a shape that Meshwright knows."""

    def items(self, field: str, raw: bytes, random: Chance) -> Any:
        """The items of a picture, film or sound as one array or tensor: items × the field's item shape."""


def load_encoder(named: str) -> Any:
    """An instance of the class that data.encoder = "file.py:Class" names."""
    file, _, name = named.rpartition(":")
    path = Path(file).expanduser()
    if not file or not path.is_file():
        raise UserError(f'data.encoder = "{named}" is no file and class; write it as "file.py:Encoder"')
    spec = importlib.util.spec_from_file_location(f"meshwright_encoder_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        encoder = getattr(module, name)()
    except Exception as error:
        raise UserError(
            f'data.encoder = "{named}" cannot be loaded ({type(error).__name__}: {error}); fix it'
        ) from error
    if not any(callable(getattr(encoder, method, None)) for method in ("cook", "items")):
        raise UserError(f'data.encoder = "{named}" has neither cook(record) nor items(field, raw, random); define one')
    return encoder


def encoder_fingerprint(named: str) -> str:
    """A hash of the file, since it shapes what is prepared."""
    return hashlib.sha256(Path(named.rpartition(":")[0]).expanduser().read_bytes()).hexdigest()
