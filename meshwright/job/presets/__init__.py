"""Public model shapes and ready-made job files, by name."""

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import UserError

_HERE = Path(__file__).parent
_RECIPES = _HERE.parent / "recipes"


@cache
def _models() -> dict[str, dict[str, Any]]:
    return tomllib.loads((_HERE / "models.toml").read_text(encoding="utf-8"))


def model_presets() -> list[str]:
    """The names that `model.preset` accepts."""
    return sorted(_models())


def model_preset(name: str) -> dict[str, Any]:
    """The [model] fields of a public shape."""
    if name not in _models():
        raise UserError(f'model.preset = "{name}" is not known; {nearest(name, model_presets())}')
    return dict(_models()[name])


def recipes() -> list[str]:
    """The names that commands accept instead of a job file's path."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml"))


def recipe_path(name: str) -> Path | None:
    """The job file of a recipe, or None if there is none by that name."""
    path = _RECIPES / f"{name}.toml"
    return path if name in recipes() else None


def nearest(name: str, known: list[str]) -> str:
    """A remedy for a misspelt name: the closest known ones, or all of them."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(known)}"
