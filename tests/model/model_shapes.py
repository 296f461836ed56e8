"""Tiny shapes the model tests share, one of each architecture."""

import tomllib
from pathlib import Path
from typing import Any

import meshwright.job.model
from meshwright.job.model import Model

PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(meshwright.job.model.__file__).parent / "presets" / "models.toml").read_text()
)
TINY = [name for name in PRESETS if name.startswith("tiny-")]


def preset(name: str, **changes: Any) -> Model:
    return Model(**PRESETS[name] | changes)
