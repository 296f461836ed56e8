"""A job file with other values in some fields: its lines stay as they are, comments and order included.

The standard library reads TOML and does not write it. Statements are found by giving the reader ever more lines until
it accepts them, so that strings and lists over several lines need no second parser; the result is read again and
compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError
from meshwright.job.reading import toml_table
from meshwright.job.text import toml_value

Table = dict[str, Any]
Place = tuple[str, ...]


@dataclass(frozen=True)
class _Statement:
    """One header or one `key = value`, over as many lines as it takes."""

    lines: tuple[str, ...]
    table: Place
    """The table it is in; of a header, the one it opens."""
    sets: Table
    """What it says, within that table; nothing for a header, a comment or an empty line."""
    header: bool = False

    @property
    def key(self) -> str:
        """What is left of its equals sign."""
        return self.lines[0].partition("=")[0].strip() if self.sets else ""

    @property
    def fields(self) -> set[Place]:
        """The `(section, field)` it sets, or a part of."""
        return {place[:2] for place in _places(self.sets, self.table)}


def edited_text(text: str, changes: Mapping[str, Any], name: str = "the job") -> str:
    """A job file's text in which the `section.field` have these values; None removes a field.

    Everything else stays, comments included. A UserError says where the file's form does not allow it.
    """
    wanted = toml_table(text)
    statements = list(_statements(text))
    for dotted, value in changes.items():
        section, field = dotted.split(".")
        statements = _edited(statements, section, field, value)
        fields = wanted.setdefault(section, {})
        fields.pop(field, None)
        if value is not None:
            fields[field] = value
    new = "".join(line for statement in statements for line in statement.lines)
    try:
        same = _plain(toml_table(new)) == _plain(wanted)
    except ValueError:
        same = False
    if not same:
        changed = ", ".join(changes)
        raise UserError(
            f"{name} is written in a way in which {changed} cannot be changed line by line; write its sections as "
            "[section] with one field per line"
        )
    return new


def _plain(table: Table) -> Table:
    """Without sections that say nothing, and lists for tuples."""
    return {
        name: {field: list(value) if isinstance(value, tuple) else value for field, value in fields.items()}
        if isinstance(fields, dict)
        else fields
        for name, fields in table.items()
        if fields != {}
    }


def _statements(text: str) -> Iterator[_Statement]:
    lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")] if text else []
    table: Place = ()
    place = 0
    while place < len(lines):
        start, end = place, place + 1
        while (said := _said("".join(lines[start:end]))) is None and end < len(lines):
            end += 1
        place = end
        own = tuple(lines[start:end])
        if said and own[0].lstrip().startswith("["):
            table = next(_places(said, (), empty=True))
            yield _Statement(own, table, {}, header=True)
        else:
            yield _Statement(own, table, said or {})


def _said(text: str) -> Table | None:
    try:
        return toml_table(text)
    except ValueError:
        return None


def _places(table: Table, above: Place, *, empty: bool = False) -> Iterator[Place]:
    """Every key with a value, from the top of the file; with `empty` the tables that hold none yet."""
    for key, value in table.items():
        inner = value[0] if empty and isinstance(value, list) and value and isinstance(value[0], dict) else value
        if isinstance(inner, dict) and inner:
            yield from _places(inner, (*above, key), empty=empty)
        else:
            yield (*above, key)


def _edited(statements: list[_Statement], section: str, field: str, value: Any) -> list[_Statement]:
    place = (section, field)
    # A field that is a table may have a header of its own, as [cluster.links].
    left = [one for one in statements if one.table[:2] != place or not (one.header or one.sets)]
    inline = next((one for one in left if one.table == () and one.key == section), None)
    if inline is not None:  # section = {…} holds no comment: it is written again with the field changed
        fields = {name: inner for name, inner in inline.sets[section].items() if name != field}
        fields |= {} if value is None else {field: value}
        new = _with_text(inline, section, fields, {section: fields})
        return [new if one is inline else one for one in left]
    found = [one for one in left if place in one.fields]
    if found and value is not None:
        new = _with_value(found[0], section, field, value)
        return [new if one is found[0] else one for one in left if one is found[0] or one not in found]
    left = [one for one in left if one not in found]
    return left if value is None else _inserted(left, section, field, value)


def _with_value(statement: _Statement, section: str, field: str, value: Any) -> _Statement:
    """The same key with another value; what was part of the field, as `links.node = 3`, becomes the whole of it."""
    if statement.table == ():
        return _with_text(statement, f"{section}.{field}", value, {section: {field: value}})
    return _with_text(statement, field, value, {field: value})


def _with_text(statement: _Statement, key: str, value: Any, sets: Table) -> _Statement:
    first, last = statement.lines[0], statement.lines[-1]
    indent = first[: len(first) - len(first.lstrip())]
    before, _, after = first.partition("=")
    same = before.strip() == key
    padding = before.removeprefix(indent + key) if same else " "
    space = after[: len(after) - len(after.lstrip(" "))] if same else " "
    end = "\r\n" if last.endswith("\r\n") else "\n"
    line = f"{indent}{key}{padding}={space}{toml_value(value)}{_comment(statement.lines)}{end}"
    return _Statement((line,), statement.table, sets)


def _comment(lines: tuple[str, ...]) -> str:
    """The comment after a statement, with the spaces before it: the first # without which the rest reads the same."""
    whole, last = "".join(lines[:-1]), lines[-1].rstrip("\r\n")
    said = _said("".join(lines))
    for place in (place for place, letter in enumerate(last) if letter == "#"):
        if _said(whole + last[:place]) == said:
            bare = last[:place].rstrip()
            return last[len(bare) :]
    return ""


def _inserted(statements: list[_Statement], section: str, field: str, value: Any) -> list[_Statement]:
    """A new field after the last one of its section, which may be new as well."""
    dotted = [place for place, one in enumerate(statements) if one.table == () and section in one.sets]
    if dotted:
        new = _Statement((f"{section}.{field} = {toml_value(value)}\n",), (), {section: {field: value}})
        return [*statements[: dotted[-1] + 1], new, *statements[dotted[-1] + 1 :]]
    new = _Statement((f"{field} = {toml_value(value)}\n",), (section,), {field: value})
    own = [place for place, one in enumerate(statements) if one.table == (section,) and (one.header or one.sets)]
    if own:
        return [*statements[: own[-1] + 1], new, *statements[own[-1] + 1 :]]
    space = [_Statement(("\n",), (section,), {})] if statements else []
    header = _Statement((f"[{section}]\n",), (section,), {}, header=True)
    return [*statements, *space, header, new]
