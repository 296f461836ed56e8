"""Convert another program's settings to a job: a table maps each setting to a field, or lists values without effect.

A setting with neither is rejected by name: the job is written only when every setting is resolved.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.job.job import Job
from meshwright.job.load import field_names, job_of_table
from meshwright.job.model import Model
from meshwright.job.presets import model_preset
from meshwright.job.reading import json_table, read_settings_text, reason, require_undotted_keys, toml_table

ONE_RANK = "one rank is assumed: give --ranks if several share the batch"
Settings = Mapping[str, Any]
_LARGEST = 2**63
ANY = object()
"""Matches every value: the setting changes nothing that this program does."""


@dataclass(frozen=True)
class Field:
    """A setting that maps to a field of ours, through a function if its form differs."""

    ours: str
    of: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Passed:
    """A setting without a field of ours: these values are accepted, any other is rejected with what to do instead."""

    values: Collection[Any] | object
    instead: str = "remove it if the run does not need it"

    def passes(self, value: Any) -> bool:
        """Whether a value may be ignored."""
        if self.values is ANY:
            return True
        assert isinstance(self.values, Collection)
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.values)


@dataclass(frozen=True)
class Noted:
    """A setting without a field of ours that is accepted; what is lost is said at the top of the job."""

    note: str


@dataclass(frozen=True)
class Ignored:
    """A setting that changes no number, whatever its value; one line at the top of the job lists those given."""


Rule = Field | Passed | Noted | Ignored


@dataclass(frozen=True)
class Converted:
    """A job converted from another program's settings."""

    job: Job
    fields: dict[str, Any]
    """Dotted field name → value, only for fields the settings gave."""
    notes: list[str]
    """What differs slightly, or is missing from the file."""


@dataclass
class Conversion:
    """The state of converting one file."""

    settings: dict[str, Any]
    """Dotted name → value."""
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    auto: list[str] = field(default_factory=list)
    """Settings that left their value to the program that reads them."""
    ignored: list[str] = field(default_factory=list)
    """Settings that change no number."""
    beside: list[str] = field(default_factory=list)
    """Sentences on what another file rejected."""

    def drop_auto(self, remedy: str) -> None:
        """Treat "auto" as not given, and say so and what resolves it."""
        self.auto = [name for name, value in self.settings.items() if value == "auto"]
        for name in self.auto:
            del self.settings[name]
        if self.auto:
            self.notes.append(
                f'"auto" leaves a value to another program and counts as not given, {remedy}: {", ".join(self.auto)}'
            )

    def absorb(self, other: "Conversion", where: str) -> None:
        """Take over what a second file says: its fields replace ours, lists are joined, rejections name the file."""
        for name, value in other.fields.items():
            mine = self.fields.get(name)
            joined = isinstance(value, list) and name in ("memory.offload", "log.sinks")
            self.fields[name] = list(dict.fromkeys([*(mine or []), *value])) if joined else value
        self.notes += other.notes
        self.ignored += other.ignored
        self.beside += other.sentences(where)

    def ours(self, name: str) -> None:
        """Say that a field keeps its default here, as the settings do not give it."""
        section, key = name.split(".")
        default = getattr(getattr(Job(), section), key)
        self.notes.append(f"{name} is not given and keeps its default here, {_shown(default)}")

    def take(self, name: str, default: Any = None) -> Any:
        """A setting's value, which the caller handles; "auto" is rejected by name, and the default returned."""
        self.taken.add(name)
        value = self.settings.get(name, default)
        if value == "auto":
            self.refuse(name, "write the value it stands for", "leaves the choice to the other program")
            return default
        return value

    def number(self, name: str, default: Any = None) -> Any:
        """As `take`, for a setting that must be a number if given (1e3 a whole one); null counts as not given."""
        value = self.take(name, default)
        value = default if value is None else value
        if value is not default and (isinstance(value, bool) or not isinstance(value, int | float)):
            self.refuse(name, "correct it", "is not a number")
            return default
        if value is not default and not -_LARGEST <= value <= _LARGEST:  # false for NaN too
            self.refuse(name, "correct it", "is too large for a setting")
            return default
        return int(value) if isinstance(value, float) and value.is_integer() and value >= 1 else value

    def count(self, name: str, default: int | None = None) -> int:
        """As `number`, for a whole number above 0, required without a default."""
        value = self.number(name, default)
        if isinstance(value, int) and value > 0:
            return value
        if name not in self.settings:
            self.refuse(name, "write it")
        else:
            self.refuse(name, "correct it", "is not a whole number above 0")
        return default or 1

    def word(self, name: str, default: str | None = None) -> str | None:
        """As `take`, for a setting that must be one word if given; null counts as not given."""
        value = self.take(name, default)
        if value is not None and not isinstance(value, str):
            self.refuse(name, "correct it", "is not a word")
            return default
        return default if value is None else value

    def switch(self, name: str, default: bool = False) -> bool:
        """As `take`, for a setting that must be true or false if given; null is false."""
        value = self.take(name, default)
        if not isinstance(value, bool | None):
            self.refuse(name, "correct it", "is neither true nor false")
            return default
        return bool(value)

    def table(self, name: str) -> dict[str, Any]:
        """As `take`, for a setting that must be a table if given; returns a copy to pick from."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "correct it", "is not a table")
        return dict(value) if isinstance(value, dict) else {}

    def refuse(self, name: str, remedy: str, what: str = "has no counterpart here") -> None:
        """Record in one sentence why a setting cannot be converted; the first reason is kept."""
        if name not in self.settings:
            self.refusals.setdefault(name, f"{name} is not given; {remedy}")
            return
        self.refusals.setdefault(name, f"{name} = {_shown(self.settings[name])} {what}; {remedy}")

    def skip(self, section: str) -> None:
        """Mark every setting of a section as handled."""
        self.taken.update(name for name in self.settings if name.startswith(f"{section}."))

    def apply(self, rules: Mapping[str, Rule]) -> None:
        """Handle every setting that is still open, by the table."""
        for name, value in self.settings.items():
            if name in self.taken or (value in (None, {}) and name not in rules):
                continue  # null and an empty section have no effect
            self.taken.add(name)
            rule = rules.get(name)
            if rule is None:
                self.refuse(name, "remove it if the run does not need it", "is not a setting known here")
            elif isinstance(rule, Passed):
                if not rule.passes(value):
                    self.refuse(name, rule.instead)
            elif isinstance(rule, Noted):
                self.notes += [f"{name} = {_shown(value)}: {rule.note}"] if value not in (None, False) else []
            elif isinstance(rule, Ignored):
                self.ignored += [name] if value not in (None, False) else []
            elif (mine := self.take(name)) is not None:
                try:
                    self.fields[rule.ours] = rule.of(mine)
                except (ArithmeticError, KeyError, TypeError, ValueError):
                    self.refuse(name, "correct it", f"is not a valid value for {rule.ours}")

    def sentences(self, where: str) -> list[str]:
        """One sentence per rejected setting."""
        return [f"{where}: {sentence}" for sentence in self.refusals.values()]

    def finish(self, where: str) -> Converted:
        """The job, or one error that lists every rejected setting, one sentence each."""
        if rejected := [*self.sentences(where), *self.beside]:
            raise UserError("\n".join(rejected))
        if self.ignored:
            self.notes.append(f"without effect on any number, and ignored: {', '.join(self.ignored)}")
        order = field_names()
        ordered = dict(sorted(self.fields.items(), key=lambda item: order.index(item[0])))
        table: dict[str, dict[str, Any]] = {}
        for name, value in ordered.items():
            section, key = name.split(".")
            table.setdefault(section, {})[key] = value
        return Converted(_checked(table, where), ordered, self.notes)


def _checked(table: dict[str, dict[str, Any]], where: str) -> Job:
    """The job of these tables, in which only what they give is set; its model may come from elsewhere."""
    given = table.get("model", {})
    shape = {**(model_preset(given["preset"]) if "preset" in given else {}), **given}
    length = table.get("batch", {}).get("sequence_length")
    if not shape.keys() - {"init_from"} and type(length) is int and Model().max_sequence_length < length <= _LARGEST:
        shape["max_sequence_length"] = length  # the model to come decides
    job = job_of_table({**table, "model": shape} if shape else table, where)
    if not shape:
        return job
    model = Model.model_construct(_fields_set=set(given), **dict(job.model if given else Model()))
    return job.model_copy(update={"model": model})


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_settings(path: Path, whole: Collection[str] = ()) -> dict[str, Any]:
    """The settings of a JSON file, nested tables as dotted names; those named in `whole` stay tables."""
    remedy = "give the settings file itself"
    return flat_settings(json_table(path, read_settings_text(path, remedy), remedy), whole)


def read_toml_settings(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, nested tables as dotted names."""
    text = read_settings_text(path, "give the settings file itself")
    try:
        table = toml_table(text)
        require_undotted_keys(table)
        return flat_settings(table)
    except ValueError as error:
        raise UserError(f"{path} cannot be read as TOML ({reason(error)}); give the settings file itself") from None


def flat_settings(table: Settings, whole: Collection[str] = ()) -> dict[str, Any]:
    """Nested tables as dotted names; those named in `whole` stay tables."""
    return dict(_flat(table, "", frozenset(whole)))


def _flat(table: Settings, prefix: str, whole: frozenset[str]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict) and value and name not in whole:
            pairs += _flat(value, name + ".", whole)
        else:
            pairs.append((name, value))
    return pairs


def switched_off(settings: Settings, section: str, switch: str = "enabled") -> bool:
    """Whether a section's own switch is off, so that nothing in it has an effect."""
    return settings.get(f"{section}.{switch}", False) is False
