"""A Hugging Face folder as the start of a job: its shape and tokenizer, and checks for contradicting fields."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job.hf_config import model_of_folder
from meshwright.job.model import Model, RopeScaling

TOKENIZER = "tokenizer.json"
_NOT_SHAPE = ("preset", "init_from", "file", "dropout", "loss")


def start_folder(shape: Model) -> Path | None:
    """The folder that initial weights come from; None if they are random."""
    return None if shape.init_from is None else Path(shape.init_from).expanduser()


def folder_table(name: str) -> dict[str, dict[str, Any]]:
    """What `model.init_from` determines: every field of the shape, and the tokenizer that comes with the weights."""
    folder = Path(name).expanduser()
    try:
        shape = model_of_folder(folder).model_dump(mode="json", exclude=set(_NOT_SHAPE))
    except UserError as error:
        raise UserError(f'model.init_from = "{name}": {error}') from None
    tokenizer = folder / TOKENIZER
    return {"model": shape} | ({"data": {"tokenizer": str(tokenizer)}} if tokenizer.is_file() else {})


def require_agreement(name: str, shape: dict[str, Any], tables: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Reject a field of [model] that contradicts the shape of the folder's weights; `tables` come with their places."""
    for where, table in tables:
        section = table.get("model")
        for field, value in section.items() if isinstance(section, dict) else ():
            if field == "file" and value is not None:  # a resolved job lists every field
                raise UserError(
                    f"{where}: model.file with model.init_from: a folder's weights do not fit a model of your "
                    "own; leave one of them out"
                )
            if field in shape and _complete(field, value) != shape[field]:
                raise UserError(
                    f'{where}: model.{field} = {value!r} contradicts model.init_from = "{name}", whose config.json '
                    f"gives {shape[field]!r}; leave it out"
                )


def require_tokenizer(name: str, merged: dict[str, Any]) -> None:
    """Refuse to train a new tokenizer for weights trained with another."""
    data = merged.get("data")
    given = data if isinstance(data, dict) else {}
    if given.get("tokenizer") is None and given.get("sources") != ["builtin:synthetic"]:
        raise UserError(
            f'model.init_from = "{name}" has no {TOKENIZER}, and a new tokenizer would produce tokens the '
            f"weights do not know; set data.tokenizer to the model's own {TOKENIZER}"
        )


def _complete(field: str, value: Any) -> Any:
    """A table's value with its defaults; anything else is left to validation."""
    if field != "rope_scaling" or not isinstance(value, dict):
        return value
    try:
        return RopeScaling(**value).model_dump(mode="json")
    except ValidationError:
        return value
