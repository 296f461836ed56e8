"""A job as the text of a job file."""

import json
import re
from collections.abc import Mapping
from typing import Any

from meshwright.job.job import Job

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def job_text(job: Job, heading: str) -> str:
    """The text of a job file that loads as this job."""
    sections = [section for section in type(job).model_fields if section in job.model_fields_set]
    dumped = {section: getattr(job, section).model_dump(mode="json", exclude_unset=True) for section in sections}
    return table_text(dumped, heading)


def table_text(table: Mapping[str, Mapping[str, Any]], heading: str) -> str:
    """The text of a job file with these fields; TOML has no null, so a field that is None is left out."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for section, given in table.items():
        if fields := {name: value for name, value in given.items() if value is not None}:
            lines += ["", f"[{section}]", *(f"{_key(name)} = {toml_value(value)}" for name, value in fields.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def toml_value(value: Any) -> str:
    """A value as a job file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        given = {name: inner for name, inner in value.items() if inner is not None}
        return "{ " + ", ".join(f"{_key(name)} = {toml_value(inner)}" for name, inner in given.items()) + " }"
    return f"{value}"
