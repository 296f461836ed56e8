"""`meshwright job explain`: every field of a job, or those that differ from the defaults, as a commented job file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.job import Job, LoadedJob
    from meshwright.layout import Device

_FOLLOWING = ("model.kv_heads", "model.head_dim", "model.ffn_width")
"""Fields that the shape fills in from others."""
_ORIGIN_COLUMN = 40
_WIDEST = 120


@dataclass(frozen=True)
class Row:
    """One field."""

    field: str
    value: Any
    """As set, or its default; None if it is not set."""
    derived: Any
    """What it amounts to where it is not set; None if nothing determines it."""
    origin: str
    meaning: str
    changed: bool
    """Whether the job differs here from one of defaults alone."""
    why: str = ""
    """Why `auto` stands for the derived value."""


def show_explained(source: str, overrides: list[str], changed: bool, as_json: bool) -> None:
    """Print the fields of a job: value, where it came from, what it means."""
    from meshwright.cli.output import print_json, stdout_console
    from meshwright.job import load_job

    loaded = load_job(source, overrides, trust=True)  # none of its code is run
    rows = [row for row in _rows(loaded) if row.changed or not changed]
    if as_json:
        fields = [
            {"field": row.field, "value": row.value, "derived": row.derived, "origin": row.origin}
            | {"meaning": row.meaning, **({"why": row.why} if row.why else {})}
            for row in rows
        ]
        print_json({"job": loaded.name, "accumulation": loaded.job.accumulation, "fields": fields})
        return
    console = stdout_console()
    width = min(console.width, _WIDEST)
    for line in _lines(rows, width, meanings=not changed):
        style = "dim" if line.startswith("#") else "bold" if line and not line.endswith("# default") else None
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    for line in _comment(_sums(loaded.job), width):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rows(loaded: LoadedJob) -> list[Row]:
    from meshwright.job import Job, job_fields
    from meshwright.layout import THE_CPU, auto_choices, derived_values

    values, derived = loaded.job.model_dump(mode="json"), derived_values(loaded.job)
    choices, usual = auto_choices(loaded.job, _device_of(loaded.job)), auto_choices(Job(), THE_CPU)
    plain, plain_derived = Job().model_dump(mode="json"), derived_values(Job())
    rows = []
    for name, meaning in job_fields():
        section, field = name.split(".")
        value, origin = values[section][field], loaded.origin(name)
        follows = value if name in _FOLLOWING and origin == "default" else derived.get(name)
        differs = (value, derived.get(name)) != (plain[section][field], plain_derived.get(name))
        if (choice := choices.get(name)) is not None:
            differs = choice.value != usual[name].value
            rows.append(Row(name, value, choice.value, origin, meaning, differs, choice.why))
            continue
        rows.append(Row(name, value, follows, origin, meaning, differs))
        rows += _inside(loaded, rows[-1])
    return rows


def _device_of(job: Job) -> Device:
    """What the job runs on: the GPUs of its [cluster], or this machine's device where it names none."""
    from meshwright.layout import AUTO, THE_CPU, cluster_device

    device = cluster_device(job.cluster)
    if device is not None or AUTO not in (job.precision.compute, job.run.compile):
        return device or THE_CPU
    from meshwright.train import capabilities_here

    return capabilities_here(job)


def _inside(loaded: LoadedJob, row: Row) -> list[Row]:
    """The fields of a field that is a table, if it is set."""
    from meshwright.job import table_fields

    section, field = row.field.split(".")
    table = getattr(getattr(loaded.job, section), field)
    if table is None:
        return []
    inside = []
    for key, meaning in table_fields(row.field).items():
        given = key in table.model_fields_set
        differs = given and row.value[key] != type(table).model_fields[key].default
        origin = loaded.origin(f"{row.field}.{key}") if given else "default"
        inside.append(Row(f"{row.field}.{key}", row.value[key], None, origin, meaning, differs))
    return inside


def _lines(rows: list[Row], width: int, meanings: bool) -> list[str]:
    """A job file of these fields; what is not set is a comment."""
    lines, table = [], ""
    for row in _by_table(rows):
        if (own := row.field.rpartition(".")[0]) != table:
            lines += [""] * bool(table) + [f"[{own}]"]
            table = own
        elif meanings:
            lines.append("")
        lines += _comment(row.meaning, width) if meanings else []
        lines += _field(row, width)
    return [*lines, ""]


def _by_table(rows: list[Row]) -> Iterator[Row]:
    """The rows in the order of a file: the tables of a section follow its fields, and stand for the fields they are."""
    tables = {row.field.rpartition(".")[0] for row in rows if row.field.count(".") > 1}
    for _, section in groupby(rows, lambda row: row.field.partition(".")[0]):
        own = [row for row in section if row.field not in tables]
        yield from sorted(own, key=lambda row: row.field.count("."))


def _field(row: Row, width: int) -> list[str]:
    from meshwright.job import toml_value

    name = row.field.rpartition(".")[2]
    comment = f"{toml_value(row.derived)}: {row.why}" if row.why else row.origin
    if row.derived is not None and not row.why:
        return [f"{f'# {name} = {toml_value(row.derived)}':<{_ORIGIN_COLUMN}}# derived"]
    if row.value is None:
        return [f"{f'# {name}':<{_ORIGIN_COLUMN}}# not set"]
    code = f"{name} = {toml_value(row.value)}"
    if len(code) > width and isinstance(row.value, list):
        code = "\n".join([f"{name} = [", *(f"    {toml_value(one)}," for one in row.value), "]"])
    last = code.rpartition("\n")[2]
    if max(len(last), _ORIGIN_COLUMN) + len(comment) + 4 > width:
        return [*_comment(f"{comment}:", width), *code.split("\n")]
    return [*code.split("\n")[:-1], f"{last:<{_ORIGIN_COLUMN - 1}} # {comment}"]


def _sums(job: Job) -> str:
    """What the fields together amount to."""
    from meshwright.cost import active_parameters, parameter_count
    from meshwright.layout import ranks_of

    ranks, count = ranks_of(job.layout), job.accumulation
    tokens = job.tokens_per_step
    parameters = "a model of your own" if job.model.file else f"{parameter_count(job.model):,} parameters"
    if job.model.experts is not None and not job.model.file:
        parameters += f", of which a token uses {active_parameters(job.model):,}"
    return (
        f"{parameters}; {ranks} rank{'s' * (ranks > 1)}, {count} micro-batch{'es' * (count > 1)} per rank and step "
        f"(accumulation), {tokens:,} tokens per step, {tokens * job.run.steps:,} tokens in {job.run.steps:,} steps"
    )


def _comment(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), width, initial_indent="# ", subsequent_indent="# ", break_long_words=False
    )
