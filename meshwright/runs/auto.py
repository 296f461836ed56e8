"""The values of a run's fields that are `auto`: chosen once for its device, recorded, and the same in every resume."""

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.atomic import write_atomic
from meshwright.checkpoint import Checkpoint
from meshwright.job import Job, job_of_table
from meshwright.layout import AUTO, auto_choices
from meshwright.runs.folder import RunFolder, pretty
from meshwright.runs.outbox import disk_errors
from meshwright.train import capabilities


def values_of_auto(job: Job, device: torch.device, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """The value of every `section.field` that is `auto`: as the checkpoint was trained, else chosen for the device."""
    values: dict[str, Any] = {name: choice.value for name, choice in auto_choices(job, capabilities(device)).items()}
    if checkpoint is None:
        return values
    before = checkpoint.job()
    for name in values:
        section, field = name.split(".")
        if field in before.get(section, {}):
            saved = job_of_table({section: {field: before[section][field]}}, str(checkpoint.path))
            values[name] = getattr(getattr(saved, section), field)
    return values


def record_values(folder: RunFolder, values: Mapping[str, Any]) -> None:
    """Write the values into the folder's resolved job, which was made before a device was known."""
    table = folder.job()
    places = [(*name.split("."), value) for name, value in values.items()]
    missing = [place for place in places if table.get(place[0], {}).get(place[1]) == AUTO]
    for section, field, value in missing:
        table[section][field] = value
    if missing:
        with disk_errors(folder.path):
            write_atomic(folder.path / "job.resolved.json", pretty(table))
