"""Overrides of a job's fields, `section.field=value` as on the command line, and tables of fields over one another."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.errors import UserError
from meshwright.job.reading import toml_table

Table = dict[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]
"""`section.field=value` as on the command line, or a value by `section.field`."""


class WholeValue(dict[str, Any]):
    """A table that an override gives as one value: it replaces another instead of being merged with it."""


def parsed_overrides(overrides: Overrides) -> Table:
    """Tables of the fields that overrides set."""
    table: Table = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if isinstance(overrides, Mapping):
            name, equals = override, "="
        keys = [key.strip() for key in name.split(".")]
        if not equals or len(keys) < 2 or not all(keys):
            raise UserError(
                f"--set {override} is not section.field=value; write for example, --set batch.micro_batch=4"
            )
        inner = table
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict) or isinstance(inner, WholeValue):
                raise UserError(
                    f"--set {override} sets part of a value that another --set sets whole; keep one of them"
                )
        value = overrides[override] if isinstance(overrides, Mapping) else _value(text)
        inner[keys[-1]] = WholeValue(value) if isinstance(value, dict) else value
    return table


def _value(text: str) -> Any:
    """The value after the equals sign of a --set."""
    try:
        table = toml_table(f"value = {text}")
    except ValueError:
        table = {}
    # A bare word is a string: shells strip the quotes that TOML needs.
    return table["value"] if table.keys() == {"value"} else text.strip()


def merge(base: Table, over: Table) -> None:
    """Set the fields of one table in another, in place."""
    for key, value in over.items():
        if isinstance(value, dict) and not isinstance(value, WholeValue) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, dict) else value


def override_values(overrides: Sequence[str]) -> dict[str, Any]:
    """The values that overrides set, by `section.field`."""
    parsed_overrides(overrides)  # rejects what is not section.field=value
    return {name.strip(): _value(text) for name, _, text in (one.partition("=") for one in overrides)}


def override_fields(overrides: Overrides) -> list[str]:
    """The `section.field` that overrides change."""
    return list(leaves(parsed_overrides(overrides)))


def leaves(table: Table) -> Iterator[str]:
    """`section.field` for every field a table sets (deeper tables are the value of one field)."""
    for section, fields in table.items():
        if isinstance(fields, dict):
            yield from (f"{section}.{field}" for field in fields)


def inner_leaves(table: Table) -> Iterator[str]:
    """`section.field.key` for every key of a field that is a table."""
    for name in leaves(table):
        section, field = name.split(".", 1)
        if isinstance(value := table[section][field], dict):
            yield from (f"{name}.{key}" for key in value)
