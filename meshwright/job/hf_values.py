"""Values of a Hugging Face config.json, each of the kind it must have; anything else is an error that names it."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError


def needed(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(
            f"config.json has {key} = {shown(value)} where a positive whole number is needed; download it from the "
            "model's page"
        )
    return value


def given(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """A field's value; null counts as not given, 0 does not."""
    value = config.get(key)
    return default if value is None else value


def switch(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false."""
    value = given(config, key, default)
    if not isinstance(value, bool):
        raise UserError(f"config.json has {key} = {shown(value)} where true or false is needed; correct it")
    return value


def table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A table, empty if not given."""
    value = given(config, key, {})
    if not isinstance(value, dict):
        raise UserError(
            f"config.json has {key} = {shown(value)} where a table is needed; download it from the model's page"
        )
    return value


def shown(value: Any) -> str:
    """A value as errors show it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def expect(config: Mapping[str, Any], key: str, known: tuple[Any, ...], default: Any) -> None:
    """Refuse a value other than the known ones."""
    value = config.get(key, default)
    if value not in known:
        raise UserError(
            f"config.json has {key} = {shown(value)}, which Meshwright does not support; it supports {known[0]!r}"
        )
