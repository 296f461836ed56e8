"""Public model shapes and ready-made job files, by name."""

import difflib
import tomllib
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.job.presets.spelling import is_other_mixture, near_presets, preset_meant, weights_of

_HERE = Path(__file__).parent
_RECIPES = _HERE.parent / "recipes"
_MIXTURE = "is a mixture of experts of a family that Meshwright does not support; choose another model"


@cache
def _models() -> dict[str, dict[str, Any]]:
    return tomllib.loads((_HERE / "models.toml").read_text(encoding="utf-8"))


def model_presets() -> list[str]:
    """The names of public shapes, as `model.preset` records them."""
    return sorted(_models())


def preset_named(name: str) -> str | None:
    """The preset that a name stands for, in any usual spelling (`Llama-3-8B`, `meta-llama/Llama-3.1-70B`)."""
    return preset_meant(name, model_presets())


def model_preset(name: str) -> dict[str, Any]:
    """The [model] fields of a public shape, by any usual spelling of its name."""
    preset = preset_named(name)
    if preset is None:
        called = f'model.preset = "{name}"'
        if is_model_folder(name):
            raise UserError(f'{called} is a Hugging Face folder; set model.init_from = "{name}" instead')
        raise UserError(unknown_model(called, name, "set model.init_from to a Hugging Face folder or name (org/name)"))
    return deepcopy(_models()[preset])  # overrides of a job are written into it


def unknown_model(called: str, name: str, other: str) -> str:
    """Why a name is no preset and what to do, as one sentence; `other` is how to give another model."""
    if is_other_mixture(name):
        return f"{called} {_MIXTURE}"
    if near := near_presets(name, model_presets()):
        return f"{called} is not known; did you mean {' or '.join(near)}? If not, {other}"
    return f"{called} is not known; choose one of {', '.join(model_presets())}, or {other}"


def require_family_named(called: str, name: str) -> None:
    """Refuse a mixture of experts that is not supported, known by its name, before anything is downloaded for it."""
    if is_other_mixture(name):
        raise UserError(f"{called} {_MIXTURE}")


def weights_named(name: str) -> str | None:
    """The Hugging Face name of the weights that a model's name alone stands for, if they are known."""
    preset = preset_named(name)
    return None if preset is None else weights_of(preset)


def is_model_folder(name: str) -> bool:
    """Whether a name is a folder with a Hugging Face config."""
    try:
        return (Path(name).expanduser() / "config.json").is_file()
    except (OSError, ValueError, RuntimeError):  # no name that the system takes, or ~ of nobody
        return False


def recipes() -> list[str]:
    """The names that commands accept instead of a job file's path."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml"))


def recipe_path(name: str) -> Path | None:
    """The job file of a recipe, or None if there is none by that name."""
    path = _RECIPES / f"{name}.toml"
    return path if name in recipes() else None


def unknown_job(name: str) -> str:
    """Why a name is no job and what to do, as one sentence: it may be a model's."""
    if is_model_folder(name):
        return f'{name} is a Hugging Face folder, not a job; write a job file with init_from = "{name}" in [model]'
    if Path(name).is_dir():
        return f"{name} is a folder; give a job file such as {name.rstrip('/')}/job.toml"
    if (preset := preset_named(name)) is not None:
        return (
            f'{name} is a model, not a job; write a job file with preset = "{preset}" in [model], or let meshwright '
            f"plan --model {preset} --cluster 8xh100 --write job.toml write one"
        )
    if not name.endswith(".toml"):
        if is_other_mixture(name):
            return f"{name} {_MIXTURE}"
        if near := near_presets(name, model_presets()):
            models = " or ".join(near)
            return f"{name} is neither a job nor a known model; a job file may name {models} as its model.preset"
    return f"{name} is neither a file nor a recipe; {nearest(name, recipes())}"


def nearest(name: str, known: list[str]) -> str:
    """A remedy for a misspelt name: the closest known ones, or all of them."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(known)}"
