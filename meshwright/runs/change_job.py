"""The job in a run folder, when a resume changes it: the resolved one, and a file to train it again from."""

import json
import os
from typing import Any

from meshwright.atomic import write_atomic
from meshwright.errors import UserError
from meshwright.job import Job, updated_text
from meshwright.runs.folder import JOB_FILE, ORIGINAL, RunFolder, pretty
from meshwright.runs.outbox import disk_errors


def change_job(folder: RunFolder, job: Job) -> dict[str, list[Any]]:
    """Update a folder's job to the one being resumed; returns the differences as field → [before, now]."""
    resolved = pretty(job.model_dump(mode="json"))
    before, now = _fields(folder.job()), _fields(json.loads(resolved))
    changed = {name: [before.get(name), now.get(name)] for name in {**before, **now}}
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    with disk_errors(folder.path):
        if changed.keys() - {"run.folder"}:  # a run that was only moved is the same run
            _change_file(folder, {name: pair[1] for name, pair in changed.items()}, job)
        if changed:
            write_atomic(folder.path / "job.resolved.json", resolved)
    return changed


def _change_file(folder: RunFolder, changed: dict[str, Any], job: Job) -> None:
    """Change the job file, and keep what the user wrote."""
    try:
        written = folder.job_file()
    except UserError:  # missing or damaged, which is no reason not to continue
        written = ""
    if written and not os.path.lexists(folder.path / ORIGINAL):
        write_atomic(folder.path / ORIGINAL, written)
    write_atomic(folder.path / JOB_FILE, updated_text(written, changed, job))


def _fields(job: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, fields in job.items() for name, value in fields.items()}
