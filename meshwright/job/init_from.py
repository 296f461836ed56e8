"""A Hugging Face model as the start of a job: its shape and tokenizer, and checks for contradicting fields."""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.amounts import NoAmount, length
from meshwright.errors import UserError
from meshwright.job.encoder import OF_TRAINING
from meshwright.job.experts import BALANCING
from meshwright.job.hf_config import model_of_folder
from meshwright.job.hub import Tell, fetch_weights, folder_of, pinned, shadowed
from meshwright.job.job import Job
from meshwright.job.model import Model, RopeScaling
from meshwright.job.unused import JobWarning

TOKENIZER = "tokenizer.json"
_WITHOUT_TEXT = ("builtin:synthetic", "builtin:shapes", "builtin:tones")
"""Sources that need no tokenizer."""
_NOT_SHAPE = (
    "preset",
    "init_from",
    "file",
    "dropout",
    "init_std",
    "embed_std",
    "loss",
    "extra_tokens",
    "extra_tokens_weight",
    "adapter",
    "audio",
)


def start_folder(shape: Model) -> Path | None:
    """The folder that initial weights come from; None if they are random."""
    return None if shape.init_from is None else folder_of(shape.init_from)


def fetch_start(shape: Model, tell: Tell | None = None) -> None:
    """Download the initial weights if they have a Hugging Face name and are not in its cache."""
    if shape.init_from is not None:
        fetch_weights(shape.init_from, _field(shape.init_from), tell)


def pinned_start(name: str) -> str:
    """A Hugging Face name with the commit it stands for, so that every later look gives the same; a folder as it is."""
    if (cached := shadowed(name)) is not None:
        warnings.warn(
            f"{_field(name)} is the folder {Path(name).absolute()}, not the model of that name in {cached}",
            JobWarning,
            stacklevel=2,
        )
    return pinned(name, _field(name))


def folder_table(name: str) -> dict[str, dict[str, Any]]:
    """What `model.init_from` determines: every field of the shape, and the tokenizer that comes with the weights."""
    folder = folder_of(name)
    try:
        shape = model_of_folder(folder).model_dump(mode="json", exclude=set(_NOT_SHAPE))
    except UserError as error:
        raise UserError(f"{_field(name)}: {error}") from None
    tokenizer = folder / TOKENIZER
    return {"model": shape} | ({"data": {"tokenizer": str(tokenizer)}} if tokenizer.is_file() else {})


def require_agreement(name: str, shape: dict[str, Any], tables: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Reject a field of [model] that contradicts the shape of the folder's weights.

    `tables` come with their places, and later ones override earlier ones.
    """
    sections = [(where, table["model"]) for where, table in tables if isinstance(table.get("model"), dict)]
    for place, (where, section) in enumerate(sections):
        for field, value in section.items():
            if not isinstance(value, dict) and any(field in later for _, later in sections[place + 1 :]):
                continue
            if field == "file" and value is not None:  # a resolved job lists every field
                raise UserError(
                    f"{where}: model.file with model.init_from: a folder's weights do not fit a model of your "
                    "own; leave one of them out"
                )
            for given, own, theirs in _contradictions(field, value, shape):
                raise UserError(
                    f'{where}: model.{given} = {own!r} contradicts model.init_from = "{name}", whose config.json '
                    f"gives {theirs!r}; leave it out"
                )


def _contradictions(field: str, value: Any, shape: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Names and both values of what differs; how experts are balanced and what is trained is no part of the shape."""
    theirs = shape.get(field)
    if field in ("experts", "latent", "vision") and isinstance(value, dict) and isinstance(theirs, dict):
        for part, own in value.items():
            if part in theirs and part not in (*BALANCING, *OF_TRAINING) and own != theirs[part]:
                yield f"{field}.{part}", own, theirs[part]
    elif field in shape and _complete(field, value) != theirs:
        yield field, value, theirs


def require_tokenizer(name: str, merged: dict[str, Any]) -> None:
    """Refuse to train a new tokenizer for weights trained with another."""
    data = merged.get("data")
    given = data if isinstance(data, dict) else {}
    if given.get("tokenizer") is None and given.get("sources") not in [[one] for one in _WITHOUT_TEXT]:
        raise UserError(
            f'model.init_from = "{name}" has no {TOKENIZER}, and a new tokenizer would produce tokens the '
            f"weights do not know; set data.tokenizer to the model's own {TOKENIZER}"
        )


def require_base(job: Job) -> None:
    """Refuse to train adapters of a model whose weights, which stay as they are, would be random."""
    adapter = job.model.adapter
    if adapter is not None and job.model.init_from is None:
        raise UserError(
            f"model.adapter with rank = {adapter.rank} trains next to frozen weights, which are random without "
            "model.init_from; set model.init_from to a model's folder or Hugging Face name, or leave model.adapter out"
        )


def _field(name: str) -> str:
    return f'model.init_from = "{name}"'


def _complete(field: str, value: Any) -> Any:
    """A value as the shape has it, a table with its defaults; what is invalid is left to validation."""
    try:
        if field == "rope_scaling" and isinstance(value, dict):
            return RopeScaling(**value).model_dump(mode="json")
        return length(value) if field in ("max_sequence_length", "sliding_window") and value is not None else value
    except (ValidationError, NoAmount):
        return value
