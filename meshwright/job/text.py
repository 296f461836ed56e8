"""A job as the text of a job file."""

import json
from typing import Any

from meshwright.job.job import Job


def job_text(job: Job, heading: str) -> str:
    """The text of a job file that loads as this job."""
    lines = [f"# {line}" for line in heading.splitlines()]
    for section in type(job).model_fields:
        fields = getattr(job, section).model_dump(mode="json", exclude_unset=True, exclude_none=True)
        if section in job.model_fields_set and fields:
            lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in fields.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    return f"{value}"
